//! A faulty network: a proxy between a VM and a real donor.

use fabric_wire::{FLAGS_PACKING, FrameKind, HEADER_BYTES};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Delay of frames.
const LATENESS: Duration = Duration::from_millis(10);

/// The fault to inject into the donor's page frames.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mischief {
    /// None.
    None,
    /// One bit of a page is flipped.
    FlipBit,
    /// The connection ends in the middle of a frame.
    CutShort,
    /// A frame says that it is longer than any may be.
    Oversized,
    /// A frame answers a request that was never sent.
    WrongRequest,
    /// A frame is sent twice.
    Twice,
    /// A frame does not follow the protocol.
    Garbage,
    /// A frame has another protocol version.
    OtherVersion,
    /// A frame names another node as its sender.
    OtherSender,
    /// A frame has another epoch.
    OtherEpoch,
    /// Answers arrive in pairs, the second first: this is allowed and must be harmless.
    Reordered,
    /// A frame is lost; those after it arrive.
    Missing,
    /// From some point on frames arrive some milliseconds late.
    Late,
    /// Nothing more arrives.
    Silence,
    /// The connection ends instead of each page, permanently.
    NoPage,
    /// One page is withheld on every connection; all others arrive.
    LeftOut,
    /// A run has one page less than requested.
    ShortRun,
    /// A run arrives in the frame kind of a single page.
    OtherKind,
    /// Packed pages lack their last byte.
    PackedShorter,
    /// Packed pages have one byte too many.
    PackedLonger,
    /// A packed page claims more bytes than a page has.
    PackedOverlong,
    /// A packed page cannot be unpacked.
    PackedNonsense,
    /// A page arrives as packed zeroes.
    Zeroes,
}

impl Mischief {
    /// Returns whether the fault applies to packed pages only.
    fn wants_packed(self) -> bool {
        matches!(
            self,
            Self::PackedShorter | Self::PackedLonger | Self::PackedOverlong | Self::PackedNonsense
        )
    }
}

/// Replaces the payload of a frame.
fn replace_payload(frame: &mut Vec<u8>, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("a few pages");
    frame[8..12].copy_from_slice(&length.to_le_bytes());
    frame.truncate(HEADER_BYTES);
    frame.extend(payload);
}

/// A proxy between a VM and a donor.
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    donor: Mutex<SocketAddr>,
    /// The kind of frames to falsify.
    kind: FrameKind,
    mischief: Mischief,
    /// Number of connections on which a fault is still to be injected.
    left: AtomicU32,
    done: AtomicU32,
    /// Offset of the page that is withheld.
    left_out: OnceLock<[u8; 8]>,
    /// While set, connections are refused and existing ones are cut.
    cut: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// Starts a proxy that injects `mischief` once on each of the first `times` page connections
    /// that transfer enough pages.
    pub fn new(donor: SocketAddr, mischief: Mischief, times: u32) -> Self {
        Self::on(FrameKind::PageData, donor, mischief, times)
    }

    /// Like [`new`](Self::new), for frames of `kind`.
    pub fn on(kind: FrameKind, donor: SocketAddr, mischief: Mischief, times: u32) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let address = listener.local_addr().expect("bound");
        let shared = Arc::new(Shared {
            donor: Mutex::new(donor),
            kind,
            mischief,
            left: AtomicU32::new(times),
            done: AtomicU32::new(0),
            left_out: OnceLock::new(),
            cut: AtomicBool::new(false),
            streams: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = Arc::clone(&accepting);
                if !shared.cut.load(Ordering::SeqCst) {
                    std::thread::spawn(move || shared.pass(client));
                }
            }
        });
        Self { address, shared }
    }

    /// Returns how many faults were injected.
    pub fn mischief_done(&self) -> u32 {
        self.shared.done.load(Ordering::SeqCst)
    }

    /// Cuts every connection and refuses new ones, or stops doing so.
    pub fn cut(&self, cut: bool) {
        self.shared.cut.store(cut, Ordering::SeqCst);
        if cut {
            for stream in self.shared.streams.lock().unwrap().drain(..) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Sends new connections to another donor.
    pub fn redirect(&self, donor: SocketAddr) {
        *self.shared.donor.lock().unwrap() = donor;
    }
}

impl Shared {
    fn pass(&self, client: TcpStream) {
        let donor = *self.donor.lock().unwrap();
        let Ok(donor) = TcpStream::connect(donor) else {
            return;
        };
        {
            let mut streams = self.streams.lock().unwrap();
            // Since it was accepted, or it would outlive the cut.
            if self.cut.load(Ordering::SeqCst) {
                return;
            }
            streams.push(client.try_clone().expect("descriptors"));
            streams.push(donor.try_clone().expect("descriptors"));
        }
        client.set_nodelay(true).expect("a socket");
        donor.set_nodelay(true).expect("a socket");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = std::io::copy(&mut &client, &mut &donor);
                let _ = donor.shutdown(Shutdown::Both);
            });
            let _ = self.answers(&donor, &client);
            let _ = client.shutdown(Shutdown::Both);
            let _ = donor.shutdown(Shutdown::Both);
        });
    }

    /// Forwards the donor's frames one by one.
    fn answers(&self, mut donor: &TcpStream, mut client: &TcpStream) -> std::io::Result<()> {
        let mut pages = 0;
        let mut held: Option<Vec<u8>> = None;
        loop {
            let mut frame = vec![0; HEADER_BYTES];
            donor.read_exact(&mut frame)?;
            let length = u32::from_le_bytes(frame[8..12].try_into().expect("four bytes"));
            frame.resize(HEADER_BYTES + length as usize, 0);
            donor.read_exact(&mut frame[HEADER_BYTES..])?;
            let flags = u16::from_le_bytes([frame[4], frame[5]]);
            let page = frame[3] == self.kind as u8
                && (flags & FLAGS_PACKING != 0 || !self.mischief.wants_packed());
            let payload = frame[HEADER_BYTES..].to_vec();
            let middle = HEADER_BYTES + payload.len() / 2;
            pages += u32::from(page);
            if self.mischief == Mischief::NoPage && page {
                self.done.fetch_add(1, Ordering::SeqCst);
                return Ok(());
            }
            if self.mischief == Mischief::LeftOut && page {
                let offset = frame[24..32].try_into().expect("eight bytes");
                if pages == 20 {
                    let _ = self.left_out.set(offset);
                }
                if self.left_out.get() == Some(&offset) {
                    self.done.fetch_add(1, Ordering::SeqCst);
                    continue;
                }
            }
            if self.mischief == Mischief::Reordered && page {
                self.done.fetch_add(1, Ordering::SeqCst);
                match held.take() {
                    None if self.more_is_coming(donor) => held = Some(frame),
                    None => client.write_all(&frame)?,
                    Some(first) => {
                        client.write_all(&frame)?;
                        client.write_all(&first)?;
                    }
                }
                continue;
            }
            // After some correct frames, and only as often as requested.
            let late = self.mischief == Mischief::Late && pages < 40;
            let due =
                page && (pages == 20 || pages > 20 && late) && self.mischief != Mischief::None;
            let take = |left: u32| left.checked_sub(1);
            if !due
                || self
                    .left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
                    .is_err()
            {
                client.write_all(&frame)?;
                continue;
            }
            self.done.fetch_add(1, Ordering::SeqCst);
            match self.mischief {
                Mischief::FlipBit => frame[middle] ^= 0x10,
                Mischief::CutShort => {
                    client.write_all(&frame[..middle])?;
                    return Ok(());
                }
                Mischief::Oversized => frame[8..12].copy_from_slice(&u32::MAX.to_le_bytes()),
                Mischief::WrongRequest => frame[16] ^= 0x3f,
                Mischief::Twice => client.write_all(&frame)?,
                Mischief::Garbage => frame[..HEADER_BYTES].fill(0xa5),
                Mischief::OtherVersion => frame[2] = 99,
                Mischief::OtherSender => frame[6] ^= 1,
                Mischief::OtherEpoch => frame[32] ^= 1,
                Mischief::Missing => continue,
                // This is the injected delay.
                Mischief::Late => std::thread::sleep(LATENESS),
                Mischief::Silence => {
                    // Until the other side times out.
                    let mut rest = [0; 4096];
                    while donor.read(&mut rest)? > 0 {}
                    return Ok(());
                }
                Mischief::ShortRun => {
                    let shorter = payload.len().saturating_sub(4096);
                    replace_payload(&mut frame, &payload[..shorter]);
                }
                Mischief::OtherKind => {
                    frame[3] = FrameKind::PageData as u8;
                    let mut page = payload;
                    page.resize(4096, 0);
                    replace_payload(&mut frame, &page);
                }
                Mischief::PackedShorter => {
                    replace_payload(&mut frame, &payload[..payload.len() - 1]);
                }
                Mischief::PackedLonger => {
                    replace_payload(&mut frame, &[&payload[..], &[0]].concat());
                }
                Mischief::PackedOverlong => frame[HEADER_BYTES..HEADER_BYTES + 2].fill(0xff),
                Mischief::PackedNonsense => {
                    // The remaining bytes form literals without an end.
                    let bytes = u16::try_from((payload.len() - 2).min(4000)).expect("short");
                    frame[HEADER_BYTES..].fill(0xff);
                    frame[HEADER_BYTES..HEADER_BYTES + 2].copy_from_slice(&bytes.to_le_bytes());
                }
                Mischief::Zeroes => {
                    frame[4] |= 1 << FLAGS_PACKING.trailing_zeros();
                    replace_payload(&mut frame, &[0, 0]);
                }
                Mischief::None | Mischief::Reordered | Mischief::NoPage | Mischief::LeftOut => {}
            }
            client.write_all(&frame)?;
        }
    }

    fn more_is_coming(&self, donor: &TcpStream) -> bool {
        donor.set_nonblocking(true).expect("a socket");
        let more = matches!(donor.peek(&mut [0]), Ok(count) if count > 0);
        donor.set_nonblocking(false).expect("a socket");
        more
    }
}
