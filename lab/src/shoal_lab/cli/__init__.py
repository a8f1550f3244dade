"""Commands of the lab: `shoal lab NAME`, or just `shoal NAME`."""
