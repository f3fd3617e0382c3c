"""Pipeline files: from `firnline.yml` to the options that the core takes.

`loading` finds and reads a file, `models` defines its keys, `graphs` and `sql` check that it fits together,
`build` turns it into `firnline.options`, `jsonschema` describes it for editors and `template` is what
`firnline init` writes. Nothing here imports Spark, Arrow or Delta, so that the answer to a wrong spec is
immediate; only declared columns load `firnline.schema`, and only queries load the SQL parser.
"""
