"""Install packages with uv, which is many times as fast as pip, from where pip is configured to.

    .venv/bin/python -m scripts.uv_install --editable '.[dev]'

uv reads none of it. Variables of uv's own (``UV_DEFAULT_INDEX``) go before it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

# pip's word, uv's variable, and what separates several values in it.
_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", ""),
    "extra-index-url": ("UV_INDEX", " "),
    "no-index": ("UV_NO_INDEX", ""),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
    "cert": ("SSL_CERT_FILE", ""),
    "proxy": ("ALL_PROXY", ""),
}
# As in pip, where words of a command go before those of all commands, and variables before files.
_SECTIONS = ("global", "install", ":env:")


def pips_configuration() -> dict[str, str]:
    """Return the words of pip's files and variables that concern installing."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    environment = os.environ | {"PIP_QUIET": "0"}  # A configuration with quiet would list nothing.
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    sections: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, word = name.partition(".")
        if section in sections:
            sections[section][word] = str(ast.literal_eval(value))
    return {word: value for section in _SECTIONS for word, value in sections[section].items()}


def variables(configuration: dict[str, str]) -> dict[str, str]:
    """Return the variables of uv that have the meaning of pip's words.

    Args:
        configuration: the words of pip and their values.
    """
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # As in pip, all indexes are equal.
    for word, value in configuration.items():
        if word in _VARIABLES and value.strip():
            variable, separator = _VARIABLES[word]
            found[variable] = separator.join(value.split()) if separator else value.strip()
    return found


def install(*arguments: str) -> None:
    """Install packages into this environment.

    Args:
        arguments: those of ``uv pip install``.
    """
    options = ["--quiet", "--no-cache", "--compile-bytecode", "--python", sys.executable]
    environment = variables(pips_configuration()) | os.environ
    subprocess.run([sys.executable, "-m", "uv", "pip", "install", *options, *arguments], check=True, env=environment)


if __name__ == "__main__":
    try:
        install(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
