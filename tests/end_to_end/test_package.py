"""What others install and import: the wheel, the public names, and the README's code."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import qkflow

ROOT = Path(__file__).parents[2]


def test_the_wheel_builds_and_installs_alone(tmp_path: Path) -> None:
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
    alone = {"PYTHONPATH": str(target), "PATH": ""}
    subprocess.run([sys.executable, "-c", program, str(target)], check=True, cwd=tmp_path, env=alone)


def test_every_public_name_exists_and_is_explained() -> None:
    assert len(qkflow.__all__) == len(set(qkflow.__all__))
    for name in qkflow.__all__:
        value = getattr(qkflow, name)
        if callable(value):
            assert value.__doc__, name


def test_importing_qkflow_leaves_the_heavy_libraries_alone() -> None:
    heavy = {"tyro", "rich", "tokenizers", "transformers", "datasets", "torch._inductor.cpp_builder"}
    program = f"import qkflow, sys; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_code_in_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    exec("\n".join(blocks), {})


def test_nothing_in_the_package_can_unpickle() -> None:
    unsafe = r"(import|from) +(pickle|cloudpickle|dill|joblib|shelve|marshal)\b|torch\.load\(|allow_pickle=True"
    pattern = re.compile(unsafe)
    for file in (ROOT / "src").rglob("*.py"):
        assert not pattern.search(file.read_text()), file
