"""`/get_load`, `/v1/loads`, `/ping` and `/`, around the fake scheduler and as functions."""

from __future__ import annotations

import pytest

import sglang
from sglang.srt.entrypoints.loads import check_loads_query, get_load, loads
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError

STATE = {
    "queues": {"running": 3, "waiting": 2, "waiting_tokens": 500},
    "tiers": {"device": {"used_tokens": 1000, "total_tokens": 4000}},
    "transient": {"in_queue_tokens": 300},
    "gen_throughput": 12.5,
}


def test_the_load_has_what_routers_read():
    assert get_load(STATE) == [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 1500}]
    found = loads(
        STATE, ServerArgs(model_path="m", tp_size=2), {"accelerator": "GPU", "max_running_requests": 4}, 0.123456
    )
    assert (found["version"], found["accelerator"], found["num_accelerators"]) == (sglang.__version__, "GPU", 2)
    assert found["loads"] == [
        {
            "dp_rank": 0,
            "num_running_reqs": 3,
            "num_waiting_reqs": 2,
            "num_waiting_uncached_tokens": 300,
            "num_used_tokens": 1000,
            "num_total_tokens": 1500,
            "max_total_num_tokens": 4000,
            "max_running_requests": 4,
            "token_usage": 0.25,
            "gen_throughput": 12.5,
            "cache_hit_rate": 0.1235,
            "utilization": 0.75,
        }
    ]


@pytest.mark.parametrize("query", [{"dp_rank": "1"}, {"format": "prometheus"}])
def test_what_the_loads_do_not_do_is_refused(query):
    check_loads_query({"dp_rank": "0", "format": "json", "include": "core"})
    with pytest.raises(RequestError, match="must be"):
        check_loads_query(query)


def test_the_endpoints(echo_server, keyed_server):
    server = echo_server
    assert server.get("/ping").status_code == keyed_server.get("/ping").status_code == 200
    assert server.get("/get_load").json()[0].keys() == get_load(STATE)[0].keys()
    assert server.get("/v1/loads?dp_rank=0").json()["loads"][0]["max_running_requests"] == 256
    assert server.get("/v1/loads?dp_rank=1").status_code == 400
    about = server.get("/").json()
    assert (about["model"], about["version"]) == ("echo", sglang.__version__)
    assert {"/generate", "/v1/loads"} <= set(about["endpoints"]) and keyed_server.get("/").status_code == 401
