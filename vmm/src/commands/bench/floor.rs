//! The floor of a remote fault: a bare userfaultfd resolution, and a bare exchange of a page.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use fabric_host::slices::request_short_slices;
use fabric_pages::uffd::{Protection, Uffd};
use fabric_transport::control::ControlStream;
use fabric_transport::stream::{Carrier, Stream};
use fabric_wire::{Ends, Frame, FrameKind, HEADER_BYTES, LeaseGrant, LeaseRequest, TrafficClass};
use memory_fabric::NodeId;
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::page::{PAGE_SIZE, PageBytes};
use memory_fabric::stats::Histogram;
use userfaultfd::EventBuffer;

/// Number of samples in each round.
const SAMPLES: usize = 2000;

/// Measures faults that are resolved with a local page by a dedicated thread that never sleeps.
pub(super) fn userfaultfd() -> Result<Histogram> {
    let memory = GuestMemory::new(SAMPLES * PAGE_SIZE).context("cannot create memory")?;
    let uffd = Uffd::new()?;
    uffd.register(memory.guest_view(), memory.bytes())?;
    let page: PageBytes = [7; PAGE_SIZE];
    let stop = AtomicBool::new(false);
    let times = Histogram::new();
    std::thread::scope(|scope| {
        let handler = scope.spawn(|| -> Result<()> {
            request_short_slices();
            let mut events = EventBuffer::new(1);
            while !stop.load(Ordering::Relaxed) {
                let mut served = Ok(());
                let read = uffd.read_faults(&mut events, |fault| {
                    let start = fault.address & !(PAGE_SIZE - 1);
                    let target = std::ptr::with_exposed_provenance_mut(start);
                    served = uffd.copy(target, &page, Protection::WriteProtected);
                });
                if read? == 0 {
                    std::thread::yield_now();
                }
                served?;
            }
            Ok(())
        });
        // The handler computes addresses in the view.
        let _ = memory.guest_view().expose_provenance();
        let words = memory.guest_words();
        for index in 0..SAMPLES {
            let started = Instant::now();
            let word = words[index * PAGE_SIZE / size_of::<u64>()].load(Ordering::Relaxed);
            times.record(started.elapsed());
            assert_eq!(word.to_ne_bytes(), [7; 8], "the page that was installed");
        }
        stop.store(true, Ordering::Relaxed);
        handler.join().expect("the handler does not panic")
    })?;
    Ok(times)
}

/// This host and the donor.
pub(super) fn ends() -> Ends {
    Ends {
        local: NodeId(0).into(),
        donor: NodeId(1),
    }
}

/// Obtains a separate lease of `bytes`, and a connection for its pages.
pub(super) fn attach(
    donor: SocketAddr,
    carrier: &Carrier,
    bytes: u64,
    class: TrafficClass,
) -> Result<(ControlStream, LeaseGrant, Stream)> {
    let mut control = ControlStream::connect_by(donor, carrier)?;
    let request = LeaseRequest {
        vm: "floor".to_owned(),
        bytes,
        or_less: false,
        duration_ms: 60_000,
    };
    let grant: LeaseGrant = control.call(FrameKind::Lease, &request, FrameKind::Granted)?;
    let mut attached = ControlStream::connect_by(donor, carrier)?;
    attached.attach(grant.token, class, &ends())?;
    Ok((control, grant, attached.into_stream()))
}

/// Measures requests that are answered with a page over one connection, by a dedicated client that
/// never sleeps.
pub(super) fn exchange(donor: SocketAddr, carrier: &Carrier, checksum: bool) -> Result<Histogram> {
    // On a separate thread, since child threads would inherit its short scheduler slices.
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            request_short_slices();
            exchange_here(donor, carrier, checksum)
        });
        client.join().expect("the client does not panic")
    })
}

fn exchange_here(donor: SocketAddr, carrier: &Carrier, checksum: bool) -> Result<Histogram> {
    let (mut control, grant, mut stream) =
        attach(donor, carrier, PAGE_SIZE as u64, TrafficClass::Urgent)?;
    stream.set_nonblocking()?;
    let times = Histogram::new();
    let mut answer = [0; HEADER_BYTES + PAGE_SIZE];
    let frame = Frame::new(FrameKind::ReadPage, 1, 0, checksum);
    let header = frame.with_stamp(ends().stamp()).encode(&[]);
    for _ in 0..SAMPLES {
        let started = Instant::now();
        let written = stream.write_vectored(&[IoSlice::new(&header)])?;
        ensure!(
            written == header.len(),
            "a header of {HEADER_BYTES} bytes finds no room"
        );
        let mut filled = 0;
        while filled < answer.len() {
            match stream.read(&mut answer[filled..]) {
                Ok(0) => anyhow::bail!("the donor closed the connection"),
                Ok(count) => filled += count,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    ensure!(
                        started.elapsed() < Duration::from_secs(10),
                        "no answer for 10 s"
                    );
                    std::thread::yield_now();
                }
                Err(error) => return Err(error.into()),
            }
        }
        times.record(started.elapsed());
    }
    let _: fabric_wire::LeaseStatus =
        control.call(FrameKind::Release, &grant.token, FrameKind::Status)?;
    Ok(times)
}
