"""What the page's API answers as tools of the Model Context Protocol, over stdio and HTTP. Needs the extra `mcp`."""
