"""Mixtral: config, model, parallel plan and Hugging Face format."""
