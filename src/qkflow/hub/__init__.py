"""Models as folders of the Hugging Face Hub, written and read without transformers, and never executed.

FOLDER/
  config.json               the model's shape under the names that transformers uses
  generation_config.json    which tokens begin and end a text
  model.safetensors         the weights; in shards, with model.safetensors.index.json, where they are large
  tokenizer.json            text to tokens, as the `tokenizers` library reads it, with tokenizer_config.json beside it
  qkflow_tokenizer.json     the same, as qkflow reads it
  README.md                 a model card

`import qkflow.hf` teaches transformers to load it.
"""

from qkflow.hub.export import export_run
from qkflow.hub.folder import Folder, read_folder

__all__ = ["Folder", "export_run", "read_folder"]
