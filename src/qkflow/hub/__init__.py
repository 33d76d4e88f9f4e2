"""Models in the folder format of the Hugging Face Hub, written and read without transformers.

FOLDER/
  config.json               the shape of the model, under the names that transformers uses
  generation_config.json    the special tokens
  model.safetensors         the weights, or shards of them with model.safetensors.index.json
  tokenizer.json            the tokenizer for the `tokenizers` library, with tokenizer_config.json
  qkflow_tokenizer.json     the tokenizer for qkflow
  README.md                 the model card

Reading never executes anything in the folder. `import qkflow.hf` lets transformers load it.
"""

from qkflow.hub.export import export_run
from qkflow.hub.load import ModelFolder, read_folder

__all__ = ["ModelFolder", "export_run", "read_folder"]
