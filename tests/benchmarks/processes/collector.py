"""A collector of traces in its own process: prints its URL, then answers each line with the number of its spans."""

from trainhouse.tests.server.telemetry.collector import running_collector

from ..harness import answer_lines, reply

if __name__ == "__main__":
    with running_collector() as collector:
        reply(collector.url)
        answer_lines(lambda _: len(collector.spans))
