"""Conformance suites, fault drivers and a local engine, for tests of your own sources, sinks, operators and stores."""
