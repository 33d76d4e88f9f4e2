"""qkflow models in Hugging Face transformers. Importing this package registers them with the Auto classes.

>>> import qkflow.hf
>>> from transformers import AutoConfig, AutoModelForCausalLM
>>> config = AutoConfig.for_model("qkflow", hidden_size=32, num_hidden_layers=1, mechanism="standard+hamiltonian")
>>> type(AutoModelForCausalLM.from_config(config)).__name__
'QKFlowForCausalLM'
"""

try:
    import transformers
except ImportError as error:
    raise ImportError("qkflow.hf needs transformers: pip install 'qkflow[hf]'") from error

from qkflow.hf.cache import QKFlowCache
from qkflow.hf.configuration import QKFlowConfig, to_transformers
from qkflow.hf.modeling import QKFlowForCausalLM, QKFlowForSequenceClassification, QKFlowModel
from qkflow.hf.retrofit import RetrofitConfig, is_retrofitted, load_retrofitted, remove_retrofit, retrofit
from qkflow.hub import ModelFolder, export_run, read_folder

__all__ = [
    "ModelFolder",
    "QKFlowCache",
    "QKFlowConfig",
    "QKFlowForCausalLM",
    "QKFlowForSequenceClassification",
    "QKFlowModel",
    "RetrofitConfig",
    "export_run",
    "is_retrofitted",
    "load_retrofitted",
    "read_folder",
    "remove_retrofit",
    "retrofit",
    "to_transformers",
]

transformers.AutoConfig.register("qkflow", QKFlowConfig, exist_ok=True)
transformers.AutoModel.register(QKFlowConfig, QKFlowModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(QKFlowConfig, QKFlowForCausalLM, exist_ok=True)
transformers.AutoModelForSequenceClassification.register(QKFlowConfig, QKFlowForSequenceClassification, exist_ok=True)
transformers.AutoTokenizer.register(
    QKFlowConfig, fast_tokenizer_class=transformers.PreTrainedTokenizerFast, exist_ok=True
)
