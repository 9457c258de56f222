-- ARGV  id. Returns whether there was such a job.

local job = load(ARGV[OWN_ARGUMENTS])

if not job then
    return 0
end
delete(job)
return 1
