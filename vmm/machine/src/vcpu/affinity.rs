//! CPU affinity of threads (sched_setaffinity(2)).

use std::io;

use crate::sys::{CPUS, CpuSet, affinity, set_affinity};

const BITS: usize = u64::BITS as usize;

/// Returns the CPUs on which the calling thread may run, in order.
///
/// # Errors
///
/// Fails when the kernel rejects the call, which only a bug of the monitor can cause.
pub fn allowed_cpus() -> io::Result<Vec<u32>> {
    let set = affinity()?;
    let is_in = |cpu: &usize| set[cpu / BITS] >> (cpu % BITS) & 1 == 1;
    let cpus = (0..CPUS).filter(is_in);
    Ok(cpus.filter_map(|cpu| u32::try_from(cpu).ok()).collect())
}

/// Pins the calling thread to CPU `cpu` of the host.
///
/// # Errors
///
/// Fails when there is no such CPU, or the process may not use it.
pub(crate) fn pin_this_thread(cpu: u32) -> io::Result<()> {
    let cpu = usize::try_from(cpu).unwrap_or(usize::MAX);
    let mut set: CpuSet = [0; CPUS / BITS];
    let word = set.get_mut(cpu / BITS);
    *word.ok_or(io::ErrorKind::InvalidInput)? = 1 << (cpu % BITS);
    set_affinity(&set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_where_it_was_pinned_and_nowhere_else() {
        let allowed = allowed_cpus().unwrap();
        assert!(!allowed.is_empty());
        for cpu in &allowed {
            let cpu = *cpu;
            let of_thread = std::thread::spawn(move || {
                pin_this_thread(cpu).unwrap();
                allowed_cpus().unwrap()
            });
            assert_eq!(of_thread.join().unwrap(), [cpu]);
        }
        assert_eq!(allowed_cpus().unwrap(), allowed, "others stay as they were");
    }

    #[test]
    fn a_cpu_that_is_not_there_is_an_error() {
        for cpu in [8191, 8192, u32::MAX] {
            assert!(pin_this_thread(cpu).is_err());
        }
    }
}
