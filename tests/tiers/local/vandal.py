"""Random damage to the files of a live tier: remove, cut, extend, rename, copy, swap, overwrite."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.tiers.local.rig import LocalRig, segment_files


class Vandal:
    """Random damage to the directory of ``rig``, repeatable for the generator ``rng``.

    Attributes:
        acts: the damage done so far, in words.
    """

    def __init__(self, rig: LocalRig, rng: random.Random) -> None:
        self._rig = rig
        self._rng = rng
        self.acts: list[str] = []

    @property
    def _directory(self) -> Path:
        return self._rig.tier.store.directory

    def strike(self) -> None:
        """Do one random damage."""
        acts: list[tuple[Callable[[], object], int]] = [
            (self.remove, 4),
            (self.truncate, 4),
            (self.extend, 2),
            (self.rename, 4),
            (self.copy, 4),
            (self.copy_over, 2),
            (self.swap, 3),
            (self.zero, 2),
            (self.remove_checkpoint, 1),
            (self.damage_checkpoint, 1),
            (self.remove_marks, 1),
            (self.damage_marks, 1),
            (self.remove_documents, 1),
            (self.remove_lock, 1),
            (self.remove_everything, 1),
        ]
        (act,) = self._rng.choices([act for act, _ in acts], [weight for _, weight in acts])
        with contextlib.suppress(FileNotFoundError):
            self.acts.append(f"{act.__name__} {act() or ''}")

    # --------------------------------------------------------------------------------------------------------- segments

    def _segment(self) -> Path:
        found = segment_files(self._directory)
        if not found:
            raise FileNotFoundError
        return self._rng.choice(found)

    def _name(self) -> Path:
        """Return a name that a segment may have, or a similar one."""
        geometry = self._rig.tier.store.geometry
        number = self._rng.randrange(geometry.max_segments + 2)
        name = geometry.segment_name(number)
        return self._directory / self._rng.choice(
            [name, name, name, name + ".bak", geometry.segment_name(0)[:-6] + str(number)]
        )

    def remove(self) -> str:
        path = self._segment()
        path.unlink()
        return path.name

    def truncate(self) -> str:
        path = self._segment()
        size = self._rng.randrange(path.stat().st_size + 1)
        os.truncate(path, size)
        return f"{path.name} {size}"

    def extend(self) -> str:
        path = self._segment()
        os.truncate(path, path.stat().st_size + self._rng.choice([1, 4096, 1 << 20]))
        return path.name

    def rename(self) -> str:
        path, target = self._segment(), self._name()
        path.rename(target)
        return f"{path.name} {target.name}"

    def copy(self) -> str:
        path, target = self._segment(), self._name()
        if path != target:
            target.unlink(missing_ok=True)
            shutil.copy2(path, target)
        return f"{path.name} {target.name}"

    def copy_over(self) -> str:
        """Overwrite a segment file in place with another one's content."""
        path, target = self._segment(), self._segment()
        if path != target:
            shutil.copyfile(path, target)
        return f"{path.name} {target.name}"

    def swap(self) -> str:
        one, other = self._segment(), self._segment()
        aside = self._directory / "aside"
        one.rename(aside)
        if one != other:
            other.rename(one)
        aside.rename(other)
        return f"{one.name} {other.name}"

    def zero(self) -> str:
        path = self._segment()
        # A segment that was just created, or cut to nothing, has no bytes to overwrite.
        size = path.stat().st_size
        start = self._rng.randrange(size + 1)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(bytes(min(size - start, 1 << 16)))
        return f"{path.name} {start}"

    # ------------------------------------------------------------------------------------------------------ other files

    def remove_checkpoint(self) -> None:
        (self._directory / "checkpoint").unlink()

    def damage_checkpoint(self) -> None:
        self._damage(self._directory / "checkpoint")

    def remove_marks(self) -> None:
        for path in self._directory.glob("written-*"):
            path.unlink(missing_ok=True)

    def damage_marks(self) -> None:
        for path in self._directory.glob("written-*"):
            self._damage(path)

    def _damage(self, path: Path) -> None:
        size = path.stat().st_size
        if size and self._rng.random() < 0.5:
            os.truncate(path, self._rng.randrange(size))
        elif size:
            with path.open("r+b") as file:
                file.seek(self._rng.randrange(size))
                file.write(self._rng.randbytes(8))

    def remove_documents(self) -> None:
        shutil.rmtree(self._directory / "documents", ignore_errors=True)

    def remove_lock(self) -> None:
        (self._directory / "lock").unlink()

    def remove_everything(self) -> str:
        """Remove the whole directory, or move it away."""
        if self._rng.random() < 0.5:
            shutil.rmtree(self._directory, ignore_errors=True)
            return "removed"
        self._directory.rename(self._directory.with_name(f"{self._directory.name}-{self._rng.getrandbits(64):x}"))
        return "moved"
