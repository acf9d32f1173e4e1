"""Models on disk: checkpoints and Hugging Face folders. Imports no submodule: manifest.py runs without torch."""
