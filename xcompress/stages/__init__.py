"""The stages that turn rows into rows, one file each; they meet only in the schemas of :mod:`xcompress.schema`."""
