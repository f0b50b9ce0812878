"""`ObjectStore` against a dict: random writes, probes, reads, forgets, evicted keys, cut connections and restarts."""

from __future__ import annotations

import random

import pytest

from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.offload.store.resp import MAX_BACKOFF_S, StoreFailure
from support.store_servers import Clock

NUM_BLOCKS = 6


@pytest.mark.parametrize("seed", range(2))
def test_it_is_a_dict_that_may_lose_anything_at_any_time(start_redis, seed):
    random_ = random.Random(seed)
    num_pieces = random_.choice([1, 2, 5])
    server, clock = start_redis(), Clock()
    store = ObjectStore(server.address, b"model", num_pieces, timeout_s=120.0, clock=clock)
    other = ObjectStore(server.unix_address, b"another", num_pieces, timeout_s=120.0, clock=clock)
    reader, writer, control = store.reader(), store.writer(), server.connection()
    keys = [random_.randbytes(16) for _ in range(NUM_BLOCKS)]
    # What the server holds: by name, which may lack any part of a block.
    model: dict[bytes, bytes] = {}
    buffer = memoryview(bytearray(64))

    def count_leading(wanted: list[bytes]) -> int:
        flags = [store.name_of(key, b"m") in model for key in wanted]
        return flags.index(False) if False in flags else len(wanted)

    for step in range(200):
        what = random_.choices(
            ["write", "probe", "read", "forget", "evict", "other", "cut", "restart"], [8, 6, 8, 2, 5, 2, 1, 0.3]
        )[0]
        key = random_.choice(keys)
        if what == "write":
            values = [random_.randbytes(random_.randrange(65)) for _ in range(num_pieces)]
            cuts = [random_.randrange(len(value) + 1) for value in values]
            assert writer.write(key, [[v[:cut], v[cut:]] for v, cut in zip(values, cuts)]), f"{seed} {step}"
            model |= {store.name_of(key, p): value for p, value in enumerate(values)}
            model[store.name_of(key, b"m")] = b""
        elif what == "probe":
            wanted = random_.choices(keys, k=random_.randrange(NUM_BLOCKS))
            assert store.leading(wanted) == count_leading(wanted), f"{seed} {step}"
        elif what == "read":
            wanted_pieces = [
                (random_.choice(keys), random_.randrange(num_pieces)) for _ in range(random_.randrange(9))
            ]
            for each, piece in wanted_pieces:
                reader.request(each, piece)
            for each, piece in wanted_pieces:
                size = reader.receive(buffer)
                found = None if size is None else bytes(buffer[:size])
                assert found == model.get(store.name_of(each, piece)), f"{seed} {step}"
        elif what == "forget":
            store.forget(key)
            for part in (b"m", *range(num_pieces)):
                model.pop(store.name_of(key, part), None)
        elif what == "evict" and model:
            name = random_.choice(sorted(model))
            assert control.call("DEL", name) == 1
            del model[name]
        elif what == "other":
            assert other.writer().write(key, [[b"x"]] * num_pieces)
            if random_.random() < 0.3:
                other.clear()
        elif what in ("cut", "restart"):
            reader.request(key, 0)
            if what == "restart":
                server.kill()
                server.start()
                model.clear()
                control = server.connection()
            else:
                control.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            # Each connection notices once; what it was asked for is not found, and nothing else is.
            with pytest.raises(StoreFailure):
                reader.receive(buffer)
                reader.request(key, 0)
                reader.receive(buffer)
            clock.now += MAX_BACKOFF_S
            assert store.leading([key]) in (0, None, count_leading([key]))
            if writer.write(key, [[b""]] * num_pieces):
                model |= dict.fromkeys((store.name_of(key, p) for p in (*range(num_pieces), b"m")), b"")
            other.leading([key])
    assert store.leading(keys) == count_leading(keys)
