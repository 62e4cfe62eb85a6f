"""The clients whose connections are intercepted. Only here is known how each of them publishes."""
