-- After expiring_records.lua. ARGV: what to do, the id, and for put the record, its life in ms, and the most bytes.

if ARGV[1] == 'get' then
    return kept(ARGV[2])
end

local had = kept(ARGV[2]) and 1 or 0
if ARGV[1] == 'put' then
    put(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
else
    drop(ARGV[2])
end
settle()
return had
