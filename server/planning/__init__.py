"""Planning: the processes that plan, and the requests that wait for them."""
