"""`firnline spec-schema`: the JSON Schema of the pipeline file, for editors."""

from __future__ import annotations

from cyclopts import App

from firnline.cli.common import Common

EPILOGUE = """\
Made from the same models that check the file. The output is always JSON.

Examples:
  firnline spec-schema > firnline.schema.json
  firnline spec-schema | jq .properties.batch

Editors that use the YAML language server read it when the first line of
firnline.yml is: # yaml-language-server: $schema=firnline.schema.json
"""

app = App(name="spec-schema", help_epilogue=EPILOGUE)


@app.default
def spec_schema(*, common: Common = Common()) -> int:
    """Print the JSON Schema of firnline.yml."""
    from firnline.spec.models import json_schema

    common.out.json(json_schema())
    return 0
