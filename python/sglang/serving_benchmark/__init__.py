"""The parts of `python -m sglang.bench_serving`. A client: it imports no torch, and nothing of the engine that runs.

datasets ──► Workload ──► arrivals ──► runner ──► records ──► metrics ──► report, plot
                                         │  ▲
                          backends: body │  │ events
                                         ▼  │
                                      http_stream
"""
