"""Ollama's API, as far as it asks a model."""
