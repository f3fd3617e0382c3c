"""Secrets of servers in the options of every kind that has one: no text of them shows one, as a traceback might."""

from __future__ import annotations

from dataclasses import replace

from firnline.sinks.http.options import HttpSinkOptions
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sinks.redis.options import RedisSinkOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from tests.support.pipelines import pipeline_options

SECRET = "hunter2"


def test_no_form_of_the_options_shows_a_secret_of_a_server() -> None:
    followers = (
        PostgresSinkOptions("a", f"postgresql://me:{SECRET}@db/x", "t"),
        RedisSinkOptions("b", f"redis://me:{SECRET}@cache/0", stream="t"),
        HttpSinkOptions("c", f"https://h/x?k={SECRET}", headers={"Authorization": SECRET}, hmac=SECRET),
        KafkaSinkOptions("d", "b:9092", "u", sasl={"password": SECRET}, tls={"key_password": SECRET}),
    )
    source = KafkaSourceOptions("s", "b:9092", ("t",), security={"sasl.password": SECRET})
    options = replace(pipeline_options("in", "out"), sources=(source,), sinks=followers)
    shown = [repr(options), str(options), str(options.describe())]
    shown += [text for one in options.followers for text in (one.location, one.target, str(one.own_shape()))]
    assert [text for text in shown if SECRET in text] == []
