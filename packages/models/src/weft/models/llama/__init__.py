"""Llama: config, model, parallel plan and Hugging Face format."""
