"""One short file for each model family: a Hugging Face config to a `DecoderSpec`, and where its tensors go."""
