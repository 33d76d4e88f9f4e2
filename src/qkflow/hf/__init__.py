"""qkflow in Hugging Face transformers: `import qkflow.hf`, and the Auto classes load and save our models.

>>> import qkflow.hf
>>> from transformers import AutoConfig, AutoModelForCausalLM
>>> config = AutoConfig.for_model("qkflow", hidden_size=32, num_hidden_layers=1, mechanism="standard+hamiltonian")
>>> type(AutoModelForCausalLM.from_config(config)).__name__
'QKFlowForCausalLM'
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("qkflow.hf needs transformers: pip install 'qkflow[hf]'") from error

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import PreTrainedTokenizerFast as _Fast

from qkflow.hf.cache import QKFlowCache
from qkflow.hf.causal import QKFlowForCausalLM
from qkflow.hf.classification import QKFlowForSequenceClassification
from qkflow.hf.config import QKFlowConfig
from qkflow.hf.retrofit import Retrofit, load_retrofitted, retrofit, retrofitted, unfit
from qkflow.hf.tokenizer import to_transformers
from qkflow.hub import Folder, export_run, read_folder

__all__ = [
    "Folder",
    "QKFlowCache",
    "QKFlowConfig",
    "QKFlowForCausalLM",
    "QKFlowForSequenceClassification",
    "Retrofit",
    "export_run",
    "load_retrofitted",
    "read_folder",
    "retrofit",
    "retrofitted",
    "to_transformers",
    "unfit",
]

AutoConfig.register("qkflow", QKFlowConfig, exist_ok=True)
AutoModelForCausalLM.register(QKFlowConfig, QKFlowForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(QKFlowConfig, QKFlowForSequenceClassification, exist_ok=True)
AutoTokenizer.register(QKFlowConfig, fast_tokenizer_class=_Fast, exist_ok=True)
