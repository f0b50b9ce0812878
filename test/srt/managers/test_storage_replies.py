"""What an administrator is told who attaches, detaches or clears storage."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest

from sglang.srt.managers.schedule_batch import StorageRequest
from sglang.srt.managers.storage_admin import StorageAdmin
from sglang.srt.mem_cache.transfer import PROBE, StorageAction, Ticket


@pytest.mark.parametrize(
    ("action", "count", "result"),
    [
        (StorageAction.CLEAR, 1, {}),
        # Blocks are left, which is another status than that there are none to clear.
        (StorageAction.CLEAR, 0, {"cleared": False}),
        (StorageAction.ATTACH, 0, {}),
    ],
)
def test_only_storage_that_was_not_emptied_has_a_result(action: StorageAction, count: int, result: dict[str, Any]):
    storage = Mock(is_open=False, has_outstanding=False, setup=None if action == StorageAction.ATTACH else object())
    storage.administer.return_value = Ticket(PROBE, 0)
    admin = StorageAdmin(storage, lambda: None)
    admin.serve([StorageRequest(id="1", action=action, what=cast(Any, Mock(setup="{}")))])
    assert admin.end(Ticket(PROBE, 0), count)
    (reply,) = admin.take_replies()
    assert (reply.success, reply.result) == (count > 0, result)
