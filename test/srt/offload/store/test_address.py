"""Stores' URLs: what they mean, what is wrong with them, and that nobody sees a password."""

from __future__ import annotations

import pytest

from sglang.srt.offload.store.address import Endpoint, StoreAddress, TlsFiles


@pytest.mark.parametrize(
    ("url", "endpoints", "rest"),
    [
        ("redis://host", [("host", 6379)], ("", "", 0, False)),
        ("redis://host:1234/3", [("host", 1234)], ("", "", 3, False)),
        ("redis://:secret@host/", [("host", 6379)], ("", "secret", 0, False)),
        ("redis://me:sec%40ret%2F@10.0.0.1:7000", [("10.0.0.1", 7000)], ("me", "sec@ret/", 0, False)),
        ("redis://[::1]:7000", [("::1", 7000)], ("", "", 0, False)),
        ("redis://host.example.:1", [("host.example.", 1)], ("", "", 0, False)),
        ("redis://[fe80::1]", [("fe80::1", 6379)], ("", "", 0, False)),
        ("redis://a:1,b:2,c", [("a", 1), ("b", 2), ("c", 6379)], ("", "", 0, True)),
        ("redis+cluster://me:secret@a:1", [("a", 1)], ("me", "secret", 0, True)),
    ],
)
def test_what_a_url_says(url, endpoints, rest):
    address = StoreAddress.parse(url)
    assert address.endpoints == tuple(Endpoint(*each) for each in endpoints)
    assert (address.user, address.password, address.db, address.cluster) == rest


def test_what_a_unix_url_says():
    plain = StoreAddress.parse("unix:///run/redis.sock")
    assert plain.endpoints == (Endpoint(path="/run/redis.sock"),) and not plain.password and plain.db == 0
    full = StoreAddress.parse("unix://me:secret@/run/a%20b.sock?db=2")
    assert full.endpoints == (Endpoint(path="/run/a b.sock"),)
    assert (full.user, full.password, full.db) == ("me", "secret", 2)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "write it as redis://"),
        ("localhost:6379", "write it as redis://"),
        ("http://host", "write it as redis://"),
        ("rediss://host?verify=no", "always verified"),
        ("rediss://host?db=1", "for unix"),
        ("redis://host?ca=/ca.pem", "write rediss://"),
        ("rediss://host?ca=ca.pem", "full paths"),
        ("rediss://host?ca=", "full paths"),
        ("rediss://host?key=/client.key", "a key and no certificate"),
        ("redis+sentinel://a,b", "names sentinels and no master"),
        ("redis+sentinel:///name", "lacks a host"),
        ("redis+sentinel://a/name/first", "the database"),
        ("redis+tls://host", "write it as redis://"),
        ("unix+sentinel:///run/x", "write it as redis://"),
        ("redis://", "lacks a host"),
        ("redis://a,,b", "lacks a host"),
        ("redis://::1:6379", "brackets"),
        ("redis://redis..example", "a host that cannot be looked up"),
        ("redis://a," + "b" * 64, "a host that cannot be looked up"),
        ("redis+sentinel://..h/m", "a host that cannot be looked up"),
        ("redis://a\0b", "a host that cannot be looked up"),
        ("redis://host:port", "the port"),
        ("redis://host:70000", "the port"),
        ("redis://host/first", "the database"),
        ("redis://host/²", "the database"),
        ("redis://host?db=1", "for unix"),
        ("redis://a,b/1", "database 0 alone"),
        ("redis://me@host", "no password"),
        ("unix://run/redis.sock", "three slashes"),
        ("unix:///run/redis.sock?database=1", "something else than db"),
        ("redis://[::1", "cannot be read"),
    ],
)
def test_a_bad_url_is_refused_with_a_sentence(url, words):
    with pytest.raises(ValueError, match=words):
        StoreAddress.parse(url)


def test_what_a_url_with_tls_says():
    assert StoreAddress.parse("rediss://host").tls == TlsFiles()
    assert StoreAddress.parse("redis://host").tls is None
    full = StoreAddress.parse("rediss+cluster://me:secret@a,b:1?ca=/a%20b+c.pem&cert=/client.pem&key=/client.key")
    assert full.tls == TlsFiles("/a b+c.pem", "/client.pem", "/client.key")
    assert full.cluster and full.endpoints == (Endpoint("a", 6379), Endpoint("b", 1)) and full.password == "secret"
    assert not StoreAddress.parse("rediss://host").cluster and StoreAddress.parse("rediss://a,b").cluster


def test_what_a_url_with_sentinels_says():
    address = StoreAddress.parse("redis+sentinel://me:secret@a,b:1/my%2Fmaster/3")
    assert address.endpoints == (Endpoint(master="my/master"),) and address.db == 3 and not address.cluster
    assert address.sentinels == (Endpoint("a", 26379), Endpoint("b", 1)) and address.tls is None
    assert (address.user, address.password) == ("me", "secret")
    assert StoreAddress.parse("rediss+sentinel://a/m?ca=/ca.pem").tls == TlsFiles("/ca.pem")


@pytest.mark.parametrize(
    "url",
    [
        "rediss://:hunter2@h?ca=/x",
        "redis+sentinel://a:hunter2@h/m",
        "redis://me:hunter2@host",
        "redis://:hunter2@a,b",
        "unix://me:hunter2@/run/x?db=1",
    ],
)
def test_nobody_sees_the_password(url):
    address = StoreAddress.parse(url)
    assert address.password == "hunter2"
    assert "hunter2" not in f"{address} {address!r} {address.endpoints}"
    assert str(address).replace("***", "hunter2") == str(StoreAddress.parse(url)).replace("***", "hunter2")
    assert "***@" in str(address)


@pytest.mark.parametrize(
    "password", ["hun/ter2", "hun?ter2", "hun#ter2", "hun[ter2", "hun:ter2@", "hun/ter2?x=ter2", "hun\u2100ter2"]
)
@pytest.mark.parametrize("scheme", ["redis", "unix", "redis+cluster", "http", "rediss", "redis+sentinel"])
def test_no_piece_of_a_password_is_in_an_error(scheme, password):
    try:
        StoreAddress.parse(f"{scheme}://me:{password}@host")
    except ValueError as error:
        assert "ter2" not in str(error)


def test_an_address_can_be_written_down_and_parsed_again():
    for url in (
        "redis://host:1/2",
        "redis+cluster://a:1,[::1]:2",
        "unix:///run/x?db=3",
        "rediss://host:1/2?ca=/a%2Bb.pem&cert=/c.pem&key=/k.pem",
        "rediss+cluster://a:1?cert=/c.pem",
        "redis+sentinel://a:1,b:2/my%2Fmaster/3",
        "rediss+sentinel://a:1/m",
    ):
        assert str(StoreAddress.parse(url)) == url
