"""KenLM's own programs: ``lmplz`` estimates an n-gram model, ``query`` scores a text.

They are not Python packages: ``make kenlm`` builds both and puts them beside the interpreter. They are taken from the
folder that the caller names, else from beside the interpreter, else from ``PATH``.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.latent.ngram import Text, WordScores, check_estimate, check_words

logger = logging.getLogger(__name__)


_SORT_MEMORY = "20%"
"""The share of the machine's memory for sorting: by default ``lmplz`` takes 80 % and fails where it gets less."""


@dataclass(frozen=True)
class Programs:
    """The paths of KenLM's programs."""

    lmplz: Path
    query: Path


def find_programs(folder: Path | None = None) -> Programs:
    """Find ``lmplz`` and ``query`` in ``folder``, or, if that is None, beside the interpreter or on ``PATH``.

    Raises:
        ConfigError: one of them is not there: how to build it, and what to use instead.
    """
    return Programs(_find("lmplz", folder), _find("query", folder))


def _find(name: str, folder: Path | None) -> Path:
    beside = Path(sys.executable).parent
    path = shutil.which(name, path=str(folder or beside)) or (shutil.which(name) if folder is None else None)
    if path is None:
        raise ConfigError(
            f"KenLM's {name} is not in {folder or f'{beside} or on PATH'}: run 'make kenlm', or name its folder "
            "(--programs), or choose the built-in estimator, the same model in numpy (--by builtin)"
        )
    return Path(path)


@dataclass(frozen=True)
class KenLM:
    """A model in an ARPA (or KenLM binary) file, scored by ``query``."""

    model: Path
    programs: Programs

    def score(self, text: Text) -> WordScores:
        """Compute the log10 probability of each word and of each end of a sentence.

        Raises:
            DataError: ``query`` cannot read the model, or a word holds white space.
        """
        command = [str(self.programs.query), "-v", "word", "-v", "sentence", str(self.model)]
        log10: list[float] = []
        unknown: list[bool] = []
        ends: list[bool] = []
        for line in _run_program(command, _as_lines(text)).split("\n")[:-1]:
            # word=number <space> length of the n-gram <space> log10 p <tab> ... Total: ... OOV: ...
            scored = [cell.rsplit(" ", 2) for cell in line.split("\t")[:-1]]
            log10.extend(float(p) for _, _, p in scored)
            unknown.extend(word.endswith("=0") for word, _, _ in scored)
            ends.extend([False] * (len(scored) - 1) + [True])
        return WordScores(np.array(log10), np.array(unknown, dtype=bool), np.array(ends, dtype=bool))


def estimate(
    text: Text,
    arpa: Path,
    programs: Programs,
    order: int = 5,
    fallback: tuple[float, float, float] | None = None,
) -> KenLM:
    """Let ``lmplz`` estimate a model and write it to ``arpa``; see
    :func:`capt.pretrain.latent.ngram.estimate`.

    Raises:
        ConfigError: ``order`` or ``fallback`` is out of range.
        DataError: ``lmplz`` refuses the text, or a word holds white space.
    """
    check_estimate(text, order, fallback)
    command = [str(programs.lmplz), "-o", str(order), "-S", _SORT_MEMORY, "-T", str(arpa.parent), "--skip_symbols"]
    command += ["--arpa", str(arpa)]
    if fallback is not None:
        command += ["--discount_fallback", *(f"{d:g}" for d in fallback)]
    _run_program(command, _as_lines(text))
    return KenLM(arpa, programs)


def _as_lines(text: Text) -> str:
    check_words({word for sentence in text for word in sentence})
    return "".join(" ".join(sentence) + "\n" for sentence in text)


def _run_program(command: list[str], text: str) -> str:
    logger.debug("%s", " ".join(command))
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode != 0:
        message = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        raise DataError(f"{' '.join(command)}: exit code {done.returncode}: {' '.join(message[-2:]) or 'no message'}")
    return done.stdout.decode()
