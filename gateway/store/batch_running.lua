-- ARGV  id. Returns of the lines that are jobs id and "number custom_id" by turns.

return redis.call('HGETALL', key('lines', ARGV[OWN_ARGUMENTS]))
