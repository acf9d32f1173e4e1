"""GPT-2: config, model, parallel plan and Hugging Face format."""
