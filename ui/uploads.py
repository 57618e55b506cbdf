"""What gradio does with files that visitors send, and with their sessions: less, one at a time, and counted."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from ui.files import UPLOAD_S, PageFiles

if TYPE_CHECKING:
    import gradio as gr
    from gradio.data_classes import FileData

MAX_FILES: Final = 1
MAX_FIELDS: Final = 0
"""Beside the files, for which the page has no use."""


def limit_uploads(page: gr.Blocks, files: PageFiles) -> None:
    """From now on an upload of this process is one file, which ``files`` keep for ``UPLOAD_S``. Of several pages of a
    process this holds for the latest: gradio has one place for uploads.
    """
    from gradio import route_utils

    class Parser(_plain_parser()):  # type: ignore[misc]
        """Reads a form, in gradio's place."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**named, "max_files": MAX_FILES, "max_fields": MAX_FIELDS})

        async def parse(self) -> Any:
            """The form; where that fails in whatever way, nothing of it stays on disk."""
            try:
                form = await super().parse()
            except BaseException:
                for file in self._files_to_close_on_error:
                    with contextlib.suppress(OSError):
                        file.close()
                        Path(file.name).unlink(missing_ok=True)
                raise
            finally:
                sweeper.sweep_soon()
                if self.upload_progress is not None:
                    sweeper.forget_later(self.upload_progress, self.upload_id)
            return form

    sweeper = _Sweeper(page, files)
    route_utils.GradioMultiPartParser = Parser  # type: ignore[misc]


def keep_no_copies(button: gr.UploadButton) -> None:
    """Have ``button`` hand over where its upload lies, without the empty file that gradio makes beside it each time."""
    from gradio.utils import NamedString

    def process(f: FileData) -> NamedString:
        return NamedString(f.path)  # type: ignore[no-untyped-call]

    button._process_single_file = process  # type: ignore[method-assign]


class _Sweeper:
    """Sweeps ``files`` in a thread: with every upload, and once more when the last one is old enough."""

    def __init__(self, page: gr.Blocks, files: PageFiles) -> None:
        self._page = page
        self._files = files
        self._later: asyncio.TimerHandle | None = None

    def sweep_soon(self) -> None:
        """In this moment, and after ``UPLOAD_S``. Within a loop."""
        loop = asyncio.get_running_loop()
        if self._later is not None:
            self._later.cancel()
        self._later = loop.call_later(UPLOAD_S + 1, lambda: loop.run_in_executor(None, self._sweep))
        loop.run_in_executor(None, self._sweep)

    def forget_later(self, progress: Any, upload_id: str | None) -> None:
        """How far an upload is: nobody may ever ask."""

        def forget() -> None:
            progress.stop_tracking(upload_id)
            progress._signals.pop(upload_id, None)

        asyncio.get_running_loop().call_later(UPLOAD_S, forget)

    def _sweep(self) -> None:
        self._page.upload_file_set.difference_update(map(str, self._files.sweep()))


def _plain_parser() -> type:
    """Gradio's own."""
    from gradio import route_utils

    parser: type = route_utils.GradioMultiPartParser
    return parser if parser.__module__ == route_utils.__name__ else parser.__mro__[1]


def keep_sessions_lean() -> None:
    """From now on sessions of this process describe no components.

    gradio does it for links to a visitor's state, which the page has none of: anew for every session, and again with
    every update, within the event loop. A hundred visitors at once would stop everybody for seconds, and each would
    stay in memory with a whole page's text.
    """
    from gradio.state_holder import SessionState

    begin = SessionState.__init__
    if getattr(begin, "is_lean", False):
        return

    def begin_lean(self: Any, blocks: Any) -> None:
        begin(self, SimpleNamespace(default_config=blocks.default_config, blocks={}))  # type: ignore[arg-type]
        self.blocks_config.config_for_block = lambda *_: {}

    begin_lean.is_lean = True  # type: ignore[attr-defined]
    SessionState.__init__ = begin_lean  # type: ignore[method-assign]
