"""What the scheduler's state becomes in `/metrics`."""

from __future__ import annotations

from sglang.srt.observability.metrics_collector import MetricsCollector


def lines(state: dict[str, object]) -> set[str]:
    metrics = MetricsCollector("m")
    metrics.set_scheduler_state(state)
    return {line for line in metrics.render().decode().splitlines() if "peer" in line and not line.startswith("#")}


def test_a_worker_s_slabs_are_counted_by_state() -> None:
    peers = {"role": "worker", "slab_bytes": 4096, "borrowers": 2, "slabs": {"home": 3, "lent": 0}}
    peers["copies"] = {"bytes": 70, "refused": 1}
    assert lines({"peers": peers}) == {
        'sglang:hicache_peer_slab_bytes{model_name="m"} 4096.0',
        'sglang:hicache_peer_borrowers{model_name="m"} 2.0',
        'sglang:hicache_peer_slabs{model_name="m",state="home"} 3.0',
        'sglang:hicache_peer_slabs{model_name="m",state="lent"} 0.0',
        'sglang:hicache_peer_copies_bytes_total{model_name="m"} 70.0',
        'sglang:hicache_peer_copies_refused_total{model_name="m"} 1.0',
    }


def test_a_master_s_slabs_are_counted_by_worker() -> None:
    lenders = [
        {
            "endpoint": "ipc:///a",
            "connected": True,
            "left_alone": True,
            "times_left_alone": 3,
            "slabs": {"held": 2},
        },
        {
            "endpoint": "ipc:///b",
            "connected": False,
            "left_alone": False,
            "times_left_alone": 0,
            "slabs": {"held": 0},
        },
    ]
    assert lines({"peers": {"role": "master", "slab_bytes": 4096, "lenders": lenders}}) == {
        'sglang:hicache_peer_slab_bytes{model_name="m"} 4096.0',
        'sglang:hicache_peer_connected{lender="ipc:///a",model_name="m"} 1.0',
        'sglang:hicache_peer_connected{lender="ipc:///b",model_name="m"} 0.0',
        'sglang:hicache_peer_borrowed_slabs{lender="ipc:///a",model_name="m",state="held"} 2.0',
        'sglang:hicache_peer_borrowed_slabs{lender="ipc:///b",model_name="m",state="held"} 0.0',
        'sglang:hicache_peer_left_alone{lender="ipc:///a",model_name="m"} 1.0',
        'sglang:hicache_peer_left_alone{lender="ipc:///b",model_name="m"} 0.0',
        'sglang:hicache_peer_times_left_alone_total{lender="ipc:///a",model_name="m"} 3.0',
        'sglang:hicache_peer_times_left_alone_total{lender="ipc:///b",model_name="m"} 0.0',
    }


def test_links_from_the_device_tell_whether_they_are_left_alone() -> None:
    metrics = MetricsCollector("m")
    metrics.set_scheduler_state(
        {"links": {"h2d": {"bytes_done": 5}, "d2h": {"bytes_done": 7, "left_alone": True}}},
    )
    found = [line for line in metrics.render().decode().splitlines() if line.startswith("sglang:hicache_link")]
    assert found == [
        'sglang:hicache_link_bytes_total{link="h2d",model_name="m"} 5.0',
        'sglang:hicache_link_bytes_total{link="d2h",model_name="m"} 7.0',
        'sglang:hicache_link_left_alone{link="d2h",model_name="m"} 1.0',
    ]


def test_a_server_without_a_role_says_nothing_of_peers() -> None:
    assert lines({"peers": None}) == set()


def test_requests_that_gave_way_are_counted() -> None:
    metrics = MetricsCollector("m")
    metrics.set_scheduler_state({"counters": {"retracted_reqs": 3, "preempted_reqs": 2}})
    shown = metrics.render().decode().splitlines()
    assert 'sglang:num_retracted_requests_total{model_name="m"} 3.0' in shown
    assert 'sglang:num_preempted_requests_total{model_name="m"} 2.0' in shown


def test_time_per_token_is_of_answers_with_two_tokens_and_more() -> None:
    metrics = MetricsCollector("m")
    metrics.finished(9.0, 1, 0.0)
    metrics.finished(9.0, 5, 2.0)
    shown = metrics.render().decode().splitlines()
    assert 'sglang:request_time_per_output_token_seconds_count{model_name="m"} 1.0' in shown
    assert 'sglang:request_time_per_output_token_seconds_sum{model_name="m"} 0.5' in shown


def test_no_metric_is_without_samples() -> None:
    """But those of HTTP requests, which the scrape before has counted. sglang-router fails on such a metric."""
    metrics = MetricsCollector("m")
    metrics.http.began()
    metrics.http.ended("/metrics", "GET", 200)
    metrics.set_scheduler_state({"counters": {}})
    families = metrics._registry.collect()
    assert [family.name for family in families if not family.samples] == []
