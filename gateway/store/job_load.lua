-- ARGV  id. Returns the job, or nothing.

return show(ARGV[OWN_ARGUMENTS])
