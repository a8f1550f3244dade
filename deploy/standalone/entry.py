"""What the packed program runs: the command line, or Python code, as Shoal starts its helpers.

Shoal's helpers and sandboxes are `sys.executable -c CODE`, and here that is the packed program. So are the processes of
Python's own multiprocessing. `-S`, which a sandbox gives, stands for the standard library alone, as with Python.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

FLAGS = ("-B", "-I", "-S")
"""Of Python, which Shoal gives its sandboxes."""
LIBRARIES = "LD_LIBRARY_PATH"


def main() -> int:
    """Run what the words ask for; the exit code."""
    give_back_libraries()
    code = code_asked_for(sys.argv[1:])
    if code is not None:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        return 0
    multiprocessing.freeze_support()
    find_certificates()
    from shoal.cli import main as command_line

    return command_line()


def give_back_libraries() -> None:
    """Undo for children what PyInstaller's start sets: programs of the system must not load the packed libraries.

    A child that is the packed program itself then starts as its parent did, and finds them.
    """
    before = os.environ.pop(f"{LIBRARIES}_ORIG", None)
    if before is not None:
        os.environ[LIBRARIES] = before
    else:
        os.environ.pop(LIBRARIES, None)
    os.environ["PYINSTALLER_RESET_ENVIRONMENT"] = "1"


def find_certificates() -> None:
    """Where this system keeps none at the place that the packed OpenSSL knows, name those that certifi packs."""
    import _ssl  # ssl itself takes longer

    _, file, _, folder = _ssl.get_default_verify_paths()
    if not os.path.exists(file) and not os.path.isdir(folder):
        os.environ.setdefault("SSL_CERT_FILE", os.path.join(sys.prefix, "certifi", "cacert.pem"))


def code_asked_for(words: Sequence[str]) -> str | None:
    """The code of `[FLAGS] -c CODE ARGUMENTS`, with `sys.argv` and `sys.path` as Python would set them; else None."""
    place = next((at for at, word in enumerate(words) if word not in FLAGS), len(words))
    if words[place : place + 1] != ["-c"] or len(words) < place + 2:
        return None
    if "-S" in words[:place]:
        sys.meta_path.insert(0, StandardLibraryAlone())
    sys.argv = ["-c", *words[place + 2 :]]
    sys.path.insert(0, "")
    return words[place + 1]


class StandardLibraryAlone:
    """Refuses every module that Python itself does not bring."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name.partition(".")[0] not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


if __name__ == "__main__":
    sys.exit(main())
