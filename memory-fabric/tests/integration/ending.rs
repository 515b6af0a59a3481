//! The end of a fabric while threads wait for pages.

use fabric_test_support::throttle::Throttle;
use fabric_test_support::*;
use memory_fabric::fabric::Compression;
use memory_fabric::page::{PAGE_SIZE, PageIndex};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;
/// A rate that limits nothing.
const FAST: f64 = 1e9;
/// Pages that are written before, most of which are at home then. The others are untouched.
const FILLED: usize = 8192;
/// Untouched pages that a disk fills in one call: more than there is free memory for.
const TAKEN: usize = 2048;
/// Disks that write out pages which are at home.
const DISKS: usize = 100;

/// Pages of guest memory, as a device has them.
///
/// # Safety
///
/// They may only be passed on to the kernel, which reports when they are inaccessible.
unsafe fn pages(words: Words, first: usize, count: usize) -> &'static mut [u8] {
    let start = std::ptr::from_ref(words.at(first, 0)).cast_mut().cast();
    // SAFETY: the pages are inside guest memory; the caller guarantees the rest.
    unsafe { std::slice::from_raw_parts_mut(start, count * PAGE_SIZE) }
}

/// Writes a page of guest memory to a file, as a disk does, and returns the file. When the page
/// comes too late, the call fails.
fn write_out(words: Words, page: usize) -> io::Result<File> {
    // A file of its own: the kernel lets one call at a time write to a file.
    let file = tempfile::tempfile()?;
    // SAFETY: only the kernel reads it.
    let bytes = unsafe { pages(words, page, 1) };
    file.write_at(bytes, 0)?;
    Ok(file)
}

type Disks = Vec<(usize, JoinHandle<io::Result<File>>)>;

/// Returns how many threads of the process wait for a page.
fn waiting() -> usize {
    let entries = std::fs::read_dir("/proc/self/fd")
        .expect("procfs")
        .flatten();
    let is_userfaultfd = |path: &PathBuf| {
        let target = std::fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().contains("userfaultfd")
    };
    let of = |path: PathBuf| {
        let info = Path::new("/proc/self/fdinfo").join(path.file_name()?);
        let info = std::fs::read_to_string(info).ok()?;
        let total = info.lines().find_map(|line| line.strip_prefix("total:"))?;
        total.trim().parse::<usize>().ok()
    };
    let paths = entries.map(|entry| entry.path()).filter(is_userfaultfd);
    paths.filter_map(of).sum()
}

/// Fills the first pages, sets the speed of the link, and starts disks, which have to wait for
/// memory.
fn start_disks(running: &Running, seed: u64, slow: impl FnOnce()) -> Disks {
    let words = Words::of(&running.fabric);
    for page in 0..FILLED {
        for word in 0..WORDS_PER_PAGE {
            let value = pattern(seed, page, word);
            words.at(page, word).store(value, Ordering::Relaxed);
        }
    }
    let mut found = [0; FILLED];
    let memory = running.fabric.memory();
    let looked = memory.in_memory(PageIndex::new(0), &mut found);
    looked.expect("mincore");
    slow();
    let stalled = &running.fabric.stats().stalled_for_memory;
    let before = stalled.get();
    let source = File::open("/dev/urandom").expect("a file");
    std::thread::spawn(move || {
        // SAFETY: only the kernel writes them.
        let bytes = unsafe { pages(words, FILLED, TAKEN) };
        // Ends when guest memory does.
        let _ = source.read_at(bytes, 0);
    });
    wait_until("no memory is free", || stalled.get() > before);
    let start = |page| (page, std::thread::spawn(move || write_out(words, page)));
    // From the middle, since evictions go on.
    let gone = (0..FILLED / 2).rev().filter(|page| found[*page] & 1 == 0);
    let disks: Disks = gone.take(DISKS).map(start).collect();
    assert_eq!(disks.len(), DISKS);
    wait_until("the disks wait", || {
        let ended = disks.iter().filter(|(_, disk)| disk.is_finished()).count();
        waiting() + ended >= DISKS
    });
    disks
}

/// Waits for the threads, and compares what they have written: a whole page or nothing. Returns how
/// many pages were written.
fn check(disks: Disks, seed: u64) -> usize {
    let mut written = 0;
    for (page, disk) in disks {
        match disk.join().expect("no panic") {
            Ok(file) => {
                let mut bytes = vec![0; PAGE_SIZE];
                file.read_exact_at(&mut bytes, 0).expect("a whole page");
                written += 1;
                for (word, bytes) in bytes.chunks_exact(8).enumerate() {
                    let found = u64::from_ne_bytes(bytes.try_into().expect("a word"));
                    assert_eq!(found, pattern(seed, page, word), "page {page}, word {word}");
                }
            }
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}"),
        }
    }
    written
}

#[test]
fn faults_that_wait_for_memory_are_served_before_the_pager_ends() {
    in_own_process(
        "ending::faults_that_wait_for_memory_are_served_before_the_pager_ends",
        || {
            let donor = donor(GUEST);
            let link = Throttle::new(donor.address(), FAST);
            let mut config = config(GUEST, LOCAL, &[link.address]);
            config.prefetch = false;
            config.compression = Compression::Off;
            let running = start(&config);
            let stats = running.fabric.stats().clone();
            let before = stats.remote.summary().count;
            // About four pages per second.
            let disks = start_disks(&running, 1, || link.set_rate(16e3));
            let early = stats.remote.summary().count - before;
            link.set_rate(FAST);
            running.fabric.shutdown();
            let served = stats.remote.summary().count - before;
            // A thread that runs only after the end finds its page inaccessible.
            let written = check(disks, 1);
            println!("{served} of {DISKS} faults served, {early} before; {written} pages written");
            assert!(early < DISKS as u64 / 2);
            assert_eq!(served, DISKS as u64);
        },
    );
}

#[test]
fn a_disk_that_waits_for_a_page_of_a_silent_donor_writes_no_zeroes() {
    in_own_process(
        "ending::a_disk_that_waits_for_a_page_of_a_silent_donor_writes_no_zeroes",
        || {
            let donor = donor(GUEST);
            let link = Throttle::new(donor.address(), FAST);
            let mut config = config(GUEST, LOCAL, &[link.address]);
            config.prefetch = false;
            config.grace = Duration::from_secs(60);
            let running = start(&config);
            // A page would take hours.
            let disks = start_disks(&running, 2, || link.set_rate(0.1));
            running.fabric.shutdown();
            assert_eq!(check(disks, 2), 0);
        },
    );
}
