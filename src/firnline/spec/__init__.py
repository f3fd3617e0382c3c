"""Pipeline files: from `firnline.yml` to the options that the core takes.

`loading` finds and reads a file (`tree`), `models` and `operators` define its keys, `checks` finds what does not fit
together, `problems` words the messages, `build` turns it into `firnline.options`, and `template` is what
`firnline init` writes. The keys of sources and sinks are beside their kinds. Nothing here imports Spark, Arrow or
Delta, so that the answer to a wrong spec is immediate; only declared columns load `firnline.schema`, and only queries
load the SQL parser.
"""
