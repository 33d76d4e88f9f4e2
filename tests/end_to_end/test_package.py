"""The wheel, the public names, the imports and the code of the README."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import qkflow

ROOT = Path(__file__).parents[2]


def test_the_wheel_builds_and_installs(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "qkflow/py.typed" in names
    assert all(name.startswith(("qkflow/", "qkflow-")) for name in names)
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, capture_output=True)
    program = "import qkflow, sys; sys.exit(not qkflow.__file__.startswith(sys.argv[1]))"
    environment = {"PYTHONPATH": str(target), "PATH": ""}
    subprocess.run([sys.executable, "-c", program, str(target)], check=True, cwd=tmp_path, env=environment)


def test_every_public_name_exists_and_has_a_docstring() -> None:
    assert len(qkflow.__all__) == len(set(qkflow.__all__))
    for name in qkflow.__all__:
        value = getattr(qkflow, name)
        if callable(value):
            assert value.__doc__, name


def test_imports_load_no_optional_library() -> None:
    """`import qkflow` loads no heavy library, and only `qkflow.hf` needs transformers."""
    program = (
        "import sys, qkflow\n"
        "heavy = {'tyro', 'rich', 'tokenizers', 'transformers', 'datasets', 'torch._inductor.cpp_builder'}\n"
        "assert not heavy & set(sys.modules)\n"
        "import qkflow.hub, qkflow.cli\n"
        "assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None  # as if it were not installed\n"
        "try: import qkflow.hf\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "qkflow.hf needs transformers: pip install 'qkflow[hf]'"


def test_the_code_in_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {})


def test_the_package_contains_no_unpickling() -> None:
    unsafe = r"(import|from) +(pickle|cloudpickle|dill|joblib|shelve|marshal)\b|torch\.load\(|allow_pickle=True"
    pattern = re.compile(unsafe)
    for file in (ROOT / "src").rglob("*.py"):
        assert not pattern.search(file.read_text()), file
