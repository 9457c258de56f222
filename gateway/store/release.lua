-- ARGV  leases. A lease is remembered for a while after it was given back, held or not: a command about
-- it that a stalled connection delivers late finds that it is gone.

check()
redis.call('ZREMRANGEBYSCORE', GONE, '-inf', now)
for i = OWN_ARGUMENTS, #ARGV do
    remove(ARGV[i])
    redis.call('ZADD', GONE, now + TTL, ARGV[i])
end
redis.call('PEXPIREAT', GONE, now + TTL)
return finish(0)
