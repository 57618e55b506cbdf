"""Limits on uploads and on the session state that gradio stores."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from ui.files import UPLOAD_S, PageFiles

if TYPE_CHECKING:
    import gradio as gr
    from gradio.data_classes import FileData, ListFiles

MAX_FILES: Final = 1
MAX_FIELDS: Final = 0
"""Form fields other than files; the page has none."""


def limit_uploads(page: gr.Blocks, files: PageFiles) -> None:
    """Limit each upload of this process to one file, which ``files`` stores for ``UPLOAD_S`` seconds.

    Gradio has one global form parser, so with several pages in a process the latest call applies.
    """
    from gradio import route_utils

    class Parser(_plain_parser()):  # type: ignore[misc]
        """Form parser that replaces gradio's."""

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **{**keywords, "max_files": MAX_FILES, "max_fields": MAX_FIELDS})

        async def parse(self) -> Any:
            """Return the form; if parsing fails, delete its partial files."""
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


def upload_button(label: str, elem_id: str) -> gr.UploadButton:
    """Build a button for image files that passes on the path without the empty file that gradio creates each time."""
    import gradio as gr
    from gradio.data_classes import FileData

    def preprocess(payload: ListFiles | FileData | None) -> str | None:
        return payload.path if isinstance(payload, FileData) else None

    button = gr.UploadButton(label, file_types=[".png", ".jpg", ".jpeg", ".webp"], size="sm", elem_id=elem_id)
    button.preprocess = preprocess  # type: ignore[method-assign]
    return button


class _Sweeper:
    """Sweeps ``files`` in a thread after each upload, and again when the last upload has expired."""

    def __init__(self, page: gr.Blocks, files: PageFiles) -> None:
        self._page = page
        self._files = files
        self._later: asyncio.TimerHandle | None = None

    def sweep_soon(self) -> None:
        """Sweep now and after ``UPLOAD_S``; requires a running event loop."""
        loop = asyncio.get_running_loop()
        if self._later is not None:
            self._later.cancel()
        self._later = loop.call_later(UPLOAD_S + 1, lambda: loop.run_in_executor(None, self._sweep))
        loop.run_in_executor(None, self._sweep)

    def forget_later(self, progress: Any, upload_id: str | None) -> None:
        """Delete the progress of an upload later, because no page may ever request it."""

        def forget() -> None:
            progress.stop_tracking(upload_id)
            progress._signals.pop(upload_id, None)

        asyncio.get_running_loop().call_later(UPLOAD_S, forget)

    def _sweep(self) -> None:
        self._page.upload_file_set.difference_update(map(str, self._files.sweep()))


def _plain_parser() -> type:
    """Return gradio's original form parser."""
    from gradio import route_utils

    parser: type = route_utils.GradioMultiPartParser
    return parser if parser.__module__ == route_utils.__name__ else parser.__mro__[1]


def keep_sessions_lean() -> None:
    """Stop gradio from describing all components again in each session of this process.

    Gradio does it for links to a session's state, which the page does not have. It runs in the event loop for each
    session and each update: a hundred visitors would block it for seconds, and each would keep a copy of the page.
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
