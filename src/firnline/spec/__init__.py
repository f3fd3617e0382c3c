"""Pipeline files: from `firnline.yml` to the options that the core takes.

`loading` finds and reads a file, `models` says what may stand in it, `graphs` and `sql` whether it fits
together, `build` turns it into `firnline.options`, `jsonschema` describes it for editors and `template` is
what `firnline init` writes. Nothing here imports Spark, Arrow or Delta, so that a wrong spec is answered at
once; only declared columns load `firnline.schema`, and only queries load the SQL parser.
"""
