use super::*;

#[test]
fn views_are_aligned_to_huge_pages() {
    for bytes in [PAGE_SIZE, HUGE_PAGE_BYTES - PAGE_SIZE, 5 * HUGE_PAGE_BYTES] {
        let memory = GuestMemory::new(bytes).expect("a small memory");
        assert!(memory.guest_view().addr().is_multiple_of(HUGE_PAGE_BYTES));
        let last = memory.guest_words().last().expect("some words");
        last.store(7, Ordering::Relaxed);
        assert_eq!(memory.resident_bytes().expect("fstat"), PAGE_SIZE as u64);
    }
}

#[test]
fn only_whole_huge_pages_inside_the_range_may_be_huge() {
    let memory = GuestMemory::new(8 * HUGE_PAGE_BYTES).expect("a small memory");
    let allowed = |first, count| {
        let range = PageRange::new(PageIndex::new(first), count);
        memory.allow_huge_pages(range).expect("allowed") / HUGE_PAGE_BYTES
    };
    assert_eq!(allowed(0, 512), 1);
    assert_eq!(allowed(0, 511), 0);
    assert_eq!(allowed(1, 1023), 1);
    assert_eq!(allowed(1, 1022), 0);
    assert_eq!(allowed(512, 0), 0);
    assert_eq!(allowed(100, 3000), 5);
}

fn faults_of_this_thread() -> i64 {
    // SAFETY: plain numbers, for which all zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is of the kind that the call fills.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(result, 0);
    usage.ru_minflt
}

#[test]
fn a_write_makes_the_pages_it_is_for_and_maps_none() {
    for by_view in [false, true] {
        let memory = GuestMemory::new(2 * HUGE_PAGE_BYTES).expect("a small memory");
        if by_view {
            memory.write_by_view();
        } else if memory.writes_by_view() {
            println!("SKIPPED: shmem_enabled makes huge pages unasked here");
            continue;
        }
        let first = PageIndex::new(7);
        let bytes: Vec<u8> = (0..5 * PAGE_SIZE)
            .map(|at| (at / 64).to_le_bytes()[0])
            .collect();
        // Once where there is nothing, and once over what is there.
        for _ in 0..2 {
            memory
                .write(first, &vec![0xee; bytes.len()])
                .expect("written");
        }
        let faults = faults_of_this_thread();
        memory.write(first, &bytes).expect("written");
        let faults = faults_of_this_thread() - faults;
        assert!(!by_view || faults >= 5, "{faults} faults of the view");
        let resident = memory.resident_bytes().expect("fstat");
        assert_eq!(resident, bytes.len() as u64, "by view: {by_view}");
        for page in (0..16).map(PageIndex::new) {
            assert!(
                !is_mapped(memory.fabric.at(page.index() * PAGE_SIZE, PAGE_SIZE)),
                "{page}"
            );
            assert!(!is_mapped(memory.guest_page(page)), "{page}");
        }
        let mut found = [0; 16];
        memory
            .in_memory(PageIndex::new(0), &mut found)
            .expect("mincore");
        let here = |page: usize| (7..12).contains(&page);
        assert!((0..16).all(|page| (found[page] & 1 == 1) == here(page)));
        for (page, wanted) in (7..).zip(bytes.chunks(PAGE_SIZE)) {
            let mut bytes = [0; PAGE_SIZE];
            memory.read(PageIndex::new(page), &mut bytes);
            assert!(bytes == wanted, "page {page}, by view: {by_view}");
        }
    }
}

#[test]
fn a_page_that_is_read_to_be_freed_is_mapped_nowhere_and_a_hole_stays_one() {
    let memory = GuestMemory::new(HUGE_PAGE_BYTES).expect("a small memory");
    let (here, hole) = (PageIndex::new(3), PageIndex::new(9));
    memory.write(here, &[7; PAGE_SIZE]).expect("written");
    let resident = memory.resident_bytes().expect("fstat");
    let mut found = [[1; PAGE_SIZE]; 2];
    for (page, found) in [here, hole].into_iter().zip(&mut found) {
        memory.read_unmapped(page, found).expect("read");
        let view = memory.fabric.at(page.index() * PAGE_SIZE, PAGE_SIZE);
        assert!(!is_mapped(view), "{page}");
        assert!(!is_mapped(memory.guest_page(page)), "{page}");
    }
    assert!(found == [[7; PAGE_SIZE], [0; PAGE_SIZE]]);
    assert_eq!(memory.resident_bytes().expect("fstat"), resident);
}

#[test]
fn who_makes_huge_pages_unasked_is_known() {
    for setting in ["always", "within_size", "force", "what comes one day"] {
        let setting = format!("advise never [{setting}] deny\n");
        assert!(writes_make_huge_pages(&setting), "{setting}");
    }
    for setting in [
        "[advise] always",
        "always [never]\n",
        "[deny]",
        "",
        "always",
    ] {
        assert!(!writes_make_huge_pages(setting), "{setting}");
    }
}

#[test]
fn what_the_kernel_tells_of_huge_pages_is_read() {
    let rollup = "Rss:  8 kB\nShmemPmdMapped:     4096 kB\nFilePmdMapped: 0 kB\n";
    assert_eq!(mapped_huge(rollup), Some(4 << 20));
    assert_eq!(mapped_huge("Rss: 8 kB\n"), None);
    assert!(huge_bytes().is_some());
}
