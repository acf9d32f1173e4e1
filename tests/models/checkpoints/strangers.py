"""Valid model folders for the tests of hostile input, and changes to a manifest with its digest recomputed."""

import hashlib
import json

from weft.models import Llama, LlamaConfig, initialize, save_pretrained
from weft.models.checkpoint.states import save_checkpoint
from weft.models.data.tokenizer import byte_tokenizer

CONFIG = LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
NORM = "model.norm.weight"  # 16 elements, saved as a single part


def write_folders(tmp_path):
    """A run's checkpoint, and a folder for transformers without checksums.json, as another program writes a folder."""
    model = Llama(CONFIG)
    initialize(model, seed=0)
    save_checkpoint(model, tmp_path / "checkpoint", tokenizer=byte_tokenizer())
    save_pretrained(model, tmp_path / "model", tokenizer=byte_tokenizer())
    (tmp_path / "model/checksums.json").unlink()
    return tmp_path


def change_manifest(folder, change, name="manifest.json"):
    """Change the contents of a manifest, and recompute its digest."""
    value = json.loads((folder / name).read_text())
    change(value["holds"])
    value["sha256"] = hashlib.sha256(json.dumps(value["holds"]).encode()).hexdigest()
    (folder / name).write_text(json.dumps(value, indent=1) + "\n")


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
