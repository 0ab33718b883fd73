"""Log lines of the connector beside those of vLLM, which configures only its own logger."""

from __future__ import annotations

import io
import logging

import pytest

from tiering.engines.vllm.logging import OURS, share_logging


@pytest.fixture
def loggers() -> logging.Manager:
    """The loggers of a new process, separate from the test runner's."""
    return logging.Manager(logging.RootLogger(logging.WARNING))


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def engine(loggers: logging.Manager, written: io.StringIO) -> logging.Logger:
    """An engine's logger, with one handler, INFO and no propagation."""
    logger = loggers.getLogger("engine")
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s [%(name)s] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger


def test_our_lines_go_where_the_engines_go(
    loggers: logging.Manager, engine: logging.Logger, written: io.StringIO
) -> None:
    assert share_logging(engine, {})
    loggers.getLogger("kv_tiering.stack").info("tiers: primary")
    assert written.getvalue() == "INFO [kv_tiering.stack] tiers: primary\n"


def test_what_the_engine_does_not_show_we_do_not_show(
    loggers: logging.Manager, engine: logging.Logger, written: io.StringIO
) -> None:
    engine.setLevel(logging.WARNING)
    share_logging(engine, {})
    loggers.getLogger("kv_tiering.stack").info("hidden")
    loggers.getLogger("kv_tiering.stack").warning("seen")
    assert written.getvalue() == "WARNING [kv_tiering.stack] seen\n"


def test_a_line_is_written_once_however_often_it_is_set_up(
    loggers: logging.Manager, engine: logging.Logger, written: io.StringIO
) -> None:
    assert share_logging(engine, {})
    assert share_logging(engine, {})
    loggers.root.addHandler(logging.StreamHandler(written))  # the root logger may be configured later
    loggers.getLogger("kv_tiering.vllm").info("once")
    assert written.getvalue().count("once") == 1


def test_a_level_that_was_set_for_us_is_kept(
    loggers: logging.Manager, engine: logging.Logger, written: io.StringIO
) -> None:
    loggers.getLogger(OURS).setLevel(logging.DEBUG)
    share_logging(engine, {})
    loggers.getLogger("kv_tiering.vllm").debug("detail")
    assert "detail" in written.getvalue()


@pytest.mark.parametrize("name", ["root", OURS])
def test_handlers_that_somebody_gave_us_or_the_root_stay_the_only_ones(
    loggers: logging.Manager, engine: logging.Logger, written: io.StringIO, name: str
) -> None:
    theirs = io.StringIO()
    (loggers.root if name == "root" else loggers.getLogger(name)).addHandler(logging.StreamHandler(theirs))
    assert not share_logging(engine, {})
    loggers.getLogger("kv_tiering.vllm").warning("a line")
    assert theirs.getvalue() == "a line\n"
    assert written.getvalue() == ""


def test_nothing_is_set_up_where_the_engine_was_told_not_to(loggers: logging.Manager, engine: logging.Logger) -> None:
    assert not share_logging(engine, {"VLLM_CONFIGURE_LOGGING": "0"})
    assert loggers.getLogger(OURS).handlers == []


def test_nothing_is_set_up_where_the_engine_has_no_handlers(loggers: logging.Manager) -> None:
    assert not share_logging(loggers.getLogger("engine"), {})
    assert loggers.getLogger(OURS).level == logging.NOTSET
