# Work on both CPUs, each piece verified. All programs of it start first and are bound to a CPU: from the
# first line with `begin` on, CPU 1 may be on another host, where programs that start take minutes.
set -e; cd /root; rm -f s.db sq.in sq.out redis.in redis.out redis.sock
mkfifo sq.in sq.out redis.in redis.out
for cpu in 0 1; do
    taskset -c $cpu stress-ng --vm 1 --vm-bytes 16M --vm-method rand-set --verify --timeout 240 \
        >stress.$cpu 2>&1 &
    stress="$stress $!"
done
taskset -c 1 redis-server --port 0 --unixsocket redis.sock --save '' --appendonly no >redis.log &
until [ -S redis.sock ]; do sleep 0.2; done
taskset -c 0 redis-cli -s redis.sock <redis.in >redis.out &
taskset -c 1 sqlite3 s.db <sq.in >sq.out &
exec 3>sq.in 4<sq.out 5>redis.in 6<redis.out
echo 'select 1;' >&3; read -r answer <&4
echo PING >&5; read -r answer <&6
echo begin sqlite
# One line comes when CPU 1 is there.
read -r moved
echo 'create table t(i integer primary key, n int, b blob);
with recursive c(i) as (select 1 union all select i + 1 from c where i < 300)
insert into t select i, i * i, randomblob(300) from c; create index x on t(b);
pragma integrity_check; select count(*), sum(n) from t;' >&3
read -r answer <&4; echo "$answer"; read -r answer <&4; echo "$answer"
echo begin redis
for tens in {0..9}; do
    set=MSET
    for one in {0..9}; do key=$((10 * tens + one + 1)); set="$set $key $((key * key))"; done
    echo "$set" >&5; read -r answer <&6
    [ "$answer" = OK ] || echo "MSET: $answer"
done
sum=0
for tens in {0..9}; do
    get=MGET
    for one in {1..10}; do get="$get $((10 * tens + one))"; done
    echo "$get" >&5
    for one in {1..10}; do read -r answer <&6; sum=$((sum + answer)); done
done
echo "sum $sum"
echo begin stress-ng
for worker in $stress; do wait "$worker" || echo "stress-ng ended with $?"; done
echo begin end
echo 'SHUTDOWN NOSAVE' >&5
exec 3>&- 5>&-
wait
cat stress.0 stress.1
