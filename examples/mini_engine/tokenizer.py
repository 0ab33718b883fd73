"""A small reversible tokenizer: the most frequent words of a corpus, and bytes for everything else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_PIECE = re.compile(r" ?[A-Za-z_]+|\n *| ?[0-9]+| ?[^A-Za-z_0-9\s]+|\s+")
_BYTES = 256


class Tokenizer:
    """Token ids 0 to 255 are bytes; the rest are ``words``, in their order."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids = {word: _BYTES + index for index, word in enumerate(self.words)}

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> Tokenizer:
        """Return the tokenizer of the ``vocabulary - 256`` most frequent words of ``texts``.

        The same texts give the same tokenizer.
        """
        counts = Counter(piece for text in texts for piece in _PIECE.findall(text))
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls([word for word, _ in ranked[: vocabulary - _BYTES]])

    @property
    def size(self) -> int:
        """Number of token ids."""
        return _BYTES + len(self.words)

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``."""
        ids: list[int] = []
        for piece in _PIECE.findall(text):
            known = self._ids.get(piece)
            ids.extend(piece.encode() if known is None else (known,))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; ids beyond the vocabulary and broken UTF-8 are shown as replacement characters."""
        words = self.words
        data = bytearray()
        for token in ids:
            if token < _BYTES:
                data.append(token)
            elif token - _BYTES < len(words):
                data += words[token - _BYTES].encode()
            else:
                data += "\ufffd".encode()
        return data.decode(errors="replace")
