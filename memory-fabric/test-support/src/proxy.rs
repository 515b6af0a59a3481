//! A network that can be made to misbehave: a proxy between a VM and a real donor.

use memory_fabric::wire::{FLAGS_PACKING, FrameKind, HEADER_BYTES};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How late frames come.
const LATENESS: Duration = Duration::from_millis(10);

/// What is done to the donor's page frames.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mischief {
    /// Nothing.
    None,
    /// One bit of a page is flipped.
    FlipBit,
    /// The connection ends in the middle of a frame.
    CutShort,
    /// A frame says that it is longer than any may be.
    Oversized,
    /// A frame answers a request that was not made.
    WrongRequest,
    /// A frame comes twice.
    Twice,
    /// A frame is not of this protocol.
    Garbage,
    /// A frame is of another version.
    OtherVersion,
    /// Answers come in pairs, the second first: allowed, and must do no harm.
    Reordered,
    /// A frame does not come; those after it do.
    Missing,
    /// Frames come some milliseconds late, from some time on.
    Late,
    /// Nothing comes any more.
    Silence,
    /// The connection ends in place of every page, for ever.
    NoPage,
    /// A run of pages has one page less than was asked for.
    ShortRun,
    /// A run of pages comes as the answer for a single page would.
    OtherKind,
    /// Packed pages lack their last byte.
    PackedShorter,
    /// Packed pages have a byte too many.
    PackedLonger,
    /// A packed page says that it has more bytes than a page has.
    PackedOverlong,
    /// A packed page is no block that could be unpacked.
    PackedNonsense,
    /// A page comes as zeroes, packed.
    Zeroes,
}

impl Mischief {
    /// Whether it is only done to pages that are packed.
    fn wants_packed(self) -> bool {
        matches!(
            self,
            Self::PackedShorter | Self::PackedLonger | Self::PackedOverlong | Self::PackedNonsense
        )
    }
}

/// Makes the payload of a frame another one.
fn replace_payload(frame: &mut Vec<u8>, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("a few pages");
    frame[8..12].copy_from_slice(&length.to_le_bytes());
    frame.truncate(HEADER_BYTES);
    frame.extend(payload);
}

/// Passes bytes between a VM and a donor.
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    donor: Mutex<SocketAddr>,
    /// The frames that mischief is done to.
    kind: FrameKind,
    mischief: Mischief,
    /// Connections on which mischief is still to be done.
    left: AtomicU32,
    done: AtomicU32,
    /// While set, connections are refused and those there are cut.
    cut: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// A proxy that does `mischief` once on each of the first `times` page connections that
    /// carry enough pages.
    pub fn new(donor: SocketAddr, mischief: Mischief, times: u32) -> Self {
        Self::on(FrameKind::PageData, donor, mischief, times)
    }

    /// The same for frames of `kind`.
    pub fn on(kind: FrameKind, donor: SocketAddr, mischief: Mischief, times: u32) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let address = listener.local_addr().expect("bound");
        let shared = Arc::new(Shared {
            donor: Mutex::new(donor),
            kind,
            mischief,
            left: AtomicU32::new(times),
            done: AtomicU32::new(0),
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

    /// How often mischief was done.
    pub fn mischief_done(&self) -> u32 {
        self.shared.done.load(Ordering::SeqCst)
    }

    /// Cuts every connection and refuses new ones, or ends that.
    pub fn cut(&self, cut: bool) {
        self.shared.cut.store(cut, Ordering::SeqCst);
        if cut {
            for stream in self.shared.streams.lock().unwrap().drain(..) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// From now on connections go to another donor.
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

    /// Passes the donor's frames one by one.
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
            // After some that are right, and only as often as asked.
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
                Mischief::Missing => continue,
                // The delay is what is tested.
                Mischief::Late => std::thread::sleep(LATENESS),
                Mischief::Silence => {
                    // Until somebody gives up.
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
                    // As many bytes as are left: literals without an end.
                    let bytes = u16::try_from((payload.len() - 2).min(4000)).expect("short");
                    frame[HEADER_BYTES..].fill(0xff);
                    frame[HEADER_BYTES..HEADER_BYTES + 2].copy_from_slice(&bytes.to_le_bytes());
                }
                Mischief::Zeroes => {
                    frame[4] |= 1 << FLAGS_PACKING.trailing_zeros();
                    replace_payload(&mut frame, &[0, 0]);
                }
                Mischief::None | Mischief::Reordered | Mischief::NoPage => {}
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
