"""Files as modules: test folders are no packages, and a conftest.py of another folder has no name to be imported by."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[1]


def load(path: Path | str) -> ModuleType:
    """The file as a module, once; its path counts from tests/. Its name is that path with underscores."""
    file = TESTS / path
    name = "tests_" + "_".join(Path(path).with_suffix("").parts[-2:]).strip("_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
