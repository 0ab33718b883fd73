"""The workload: users who talk with the model about a document in several turns, a few at a time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from examples.demo.corpus import Document, documents, question
from examples.mini_engine import Engine, Output, Request, Tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the workload, in tokens and counts."""

    documents: int = 8
    users: int = 10
    turns: int = 3
    document_tokens: int = 1200
    answer_tokens: int = 16
    at_once: int = 2
    vocabulary: int = 4096


@dataclass(frozen=True, slots=True)
class User:
    """One user and the document that the user asks about."""

    name: str
    document: Document
    opening: list[int]
    """The document, which every prompt of this user begins with."""
    questions: list[str]


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn, answered."""

    user: str
    turn: int
    question: str
    output: Output


class Workload:
    """The conversations, which are the same in every process with the same interpreter."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        texts = documents(shape.documents)
        self.tokenizer = Tokenizer.train([document.text for document in texts], shape.vocabulary)
        names = ("Ada", "Bo", "Chen", "Dana", "Eli", "Femi", "Grete", "Hugo", "Ines", "Jun", "Kofi", "Lena")
        self.users = [
            User(
                names[number % len(names)] + ("" if number < len(names) else f" {number}"),
                texts[number % len(texts)],
                self.tokenizer.encode(f"# {texts[number % len(texts)].name}\n{texts[number % len(texts)].text}")[
                    : shape.document_tokens
                ],
                [
                    question(texts[number % len(texts)], turn + number // len(texts) * shape.turns)
                    for turn in range(shape.turns)
                ],
            )
            for number in range(shape.users)
        ]

    @property
    def requests(self) -> int:
        """Number of questions."""
        return self.shape.users * self.shape.turns

    def play(self, engine: Engine, on_step: Callable[[], None]) -> Iterator[Answered]:
        """Let all users ask, and yield the answers as they come.

        In each turn every user asks once, in any order, ``at_once`` of them at the same time.
        """
        history = {user.name: list(user.opening) for user in self.users}
        for turn in range(self.shape.turns):
            coming = deque(random.Random(turn).sample(self.users, len(self.users)))
            asking: dict[str, User] = {}
            while coming or asking:
                while coming and len(asking) < self.shape.at_once:
                    user = coming.popleft()
                    history[user.name] += self.tokenizer.encode(f"\n\nUser: {user.questions[turn]}\nAssistant:")
                    asking[user.name] = user
                    engine.add(Request(user.name, list(history[user.name]), self.shape.answer_tokens))
                for output in engine.step():
                    user = asking.pop(output.request_id)
                    history[user.name] += output.tokens
                    yield Answered(user.name, turn, user.questions[turn], output)
                on_step()
