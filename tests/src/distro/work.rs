//! The guest's workloads. Each verifies its own result: a wrong byte makes its command fail, or
//! makes its output differ from the expected one.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::{Guest, HOST_NAME};

/// A piece of work.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Its name in reports.
    pub name: &'static str,
    /// A shell script for the guest; `@HOST@` stands for the host's name there.
    pub script: &'static str,
    /// Output that the script must print besides succeeding.
    pub says: &'static str,
    /// Deadline on emulated hosts.
    pub within: Duration,
}

/// Checks the network: an address by DHCP, a name by DNS, an answer from the host.
pub const NETWORK: Work = Work {
    name: "network",
    script: "set -e; getent hosts @HOST@; ip -4 -o addr show scope global; ping -c 3 -W 10 @HOST@",
    says: "192.168.78.1",
    within: Duration::from_secs(60),
};

/// Fills, changes, reads back from disk, and checks a database. The sum of the squares up to 4000
/// is 4000 x 4001 x 8001 / 6.
pub const DATABASE: Work = Work {
    name: "sqlite",
    script: "set -e; cd /root; rm -f t.db; \
        sqlite3 t.db 'create table t(i integer primary key, n int, b blob); \
        with recursive c(i) as (select 1 union all select i + 1 from c where i < 4000) \
        insert into t select i, i * i, randomblob(300) from c; create index x on t(b);'; \
        content() { sqlite3 t.db 'select i, n, hex(b) from t order by i' | sha256sum; }; \
        before=$(content); sync; echo 3 >/proc/sys/vm/drop_caches; \
        sqlite3 t.db 'begin; update t set n = -n; update t set n = -n; delete from t where i > 4000; commit'; \
        [ \"$(content)\" = \"$before\" ]; \
        sqlite3 t.db 'pragma integrity_check; select count(*), sum(n) from t'",
    says: "ok\n4000|21341334000\n",
    within: Duration::from_secs(120),
};

/// All workloads, in execution order.
pub const ALL: &[Work] = &[
    NETWORK,
    Work {
        name: "dd",
        script: "set -e; cd /root; dd if=/dev/urandom of=p bs=1M count=64 conv=fsync; \
            before=$(sha256sum <p); dd if=p of=q bs=1M conv=fsync; echo 3 >/proc/sys/vm/drop_caches; \
            [ \"$(sha256sum <q)\" = \"$before\" ]; cmp p q; rm p q; echo same",
        says: "same",
        within: Duration::from_secs(180),
    },
    Work {
        name: "fio",
        script: "cd /root && fio --name=check --filename=fio --size=32M --rw=randrw --bs=4k --iodepth=8 \
            --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 && rm fio",
        says: "err= 0",
        within: Duration::from_secs(240),
    },
    Work {
        name: "iperf3",
        script: "set -e; iperf3 -c @HOST@ -t 3; iperf3 -c @HOST@ -t 3 -R; echo both ways",
        says: "both ways",
        within: Duration::from_secs(90),
    },
    DATABASE,
    Work {
        name: "stress-ng",
        script: "stress-ng --vm 2 --vm-bytes 300M --vm-method rand-set --verify --timeout 60s 2>&1",
        says: "successful run completed",
        within: Duration::from_secs(300),
    },
    Work {
        // Covers less than half of the memory with one test: see `HALF_OF_MEMORY`.
        name: "memtester",
        script: "MEMTESTER_TEST_MASK=1 memtester 64M 1",
        says: "Done.",
        within: Duration::from_secs(300),
    },
];

/// Tests half of the memory, twice what is local: 16 passes for stuck addresses, and two further
/// tests, random values and an increment. Under emulation this takes 40 to 80 minutes.
pub const HALF_OF_MEMORY: Work = Work {
    name: "memtester",
    script: "MEMTESTER_TEST_MASK=129 memtester 512M 1",
    says: "Done.",
    within: Duration::from_secs(2 * 3600),
};

impl Work {
    /// Runs it in the guest and returns the time it took.
    ///
    /// # Errors
    /// Fails when a byte was wrong, or the command failed.
    pub fn run(&self, guest: &Guest<'_>) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let script = self.script.replace("@HOST@", HOST_NAME);
        let said = guest
            .run(&script, self.within)
            .with_context(|| self.name.to_owned())?;
        ensure!(
            said.contains(self.says),
            "{} did not say {:?}: {said}",
            self.name,
            self.says
        );
        Ok(begin.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_database_is_to_have_the_sum_of_its_squares() {
        let sum: u64 = (1..=4000_u64).map(|i| i * i).sum();
        assert!(DATABASE.says.contains(&format!("4000|{sum}")));
    }

    #[test]
    fn names_are_unique() {
        for (number, work) in ALL.iter().enumerate() {
            assert!(ALL[..number].iter().all(|other| other.name != work.name));
        }
    }
}
