"""OpenAI's Responses API (Open Responses), over the same engine as chat completions."""
