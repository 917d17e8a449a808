//! Sealing and opening the payload of single packets with AEAD.
//!
//! Layout of sealed payload and key derivation: `vtl_proto::seal`.

#[cfg(miri)]
mod miri;

#[cfg(miri)]
use miri as ring;
use ring::{
    aead::{self, Aad, LessSafeKey, Nonce, UnboundKey},
    hkdf::{self, HKDF_SHA256, Prk},
};
use vtl_proto::{
    keys::{Secret, Suite},
    seal::{
        self, DIRECTIONS, IV, KEY, NONCE, NUMBER, TAG, UPDATE, associated, epoch, info, nonce,
        overhead, told,
    },
};

/// Output length of HKDF-Expand.
struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

fn expand(secret: &Secret, label: &str, to: &mut [u8]) {
    let info = info(to.len() as u16, label);
    let info = [&info[..]];
    Prk::new_less_safe(HKDF_SHA256, secret.as_bytes())
        .expand(&info, Length(to.len()))
        .and_then(|okm| okm.fill(to))
        .expect("HKDF-Expand makes up to 8,160 bytes");
}

/// The initial secrets of the two directions of a carrier, derived from the hosts' common secret:
/// for data of the opener, and of the other host.
pub fn directions(common: &Secret) -> [Secret; 2] {
    DIRECTIONS.map(|label| {
        let mut secret = [0; 32];
        expand(common, label, &mut secret);
        secret.into()
    })
}

fn successor(secret: &Secret) -> Secret {
    let mut next = [0; 32];
    expand(secret, UPDATE, &mut next);
    next.into()
}

/// Key material of one epoch.
struct Key {
    key: LessSafeKey,
    iv: [u8; NONCE],
}

impl Key {
    fn new(suite: Suite, secret: &Secret) -> Self {
        let algorithm = match suite {
            Suite::Aes128Gcm => &aead::AES_128_GCM,
            Suite::Aes256Gcm => &aead::AES_256_GCM,
            Suite::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
        };
        let mut key = [0; 32];
        let key = &mut key[..algorithm.key_len()];
        expand(secret, KEY, key);
        let mut iv = [0; NONCE];
        expand(secret, IV, &mut iv);
        let key = UnboundKey::new(algorithm, key).expect("as long as the algorithm's");
        Self {
            key: LessSafeKey::new(key),
            iv,
        }
    }

    fn nonce(&self, number: u64) -> Nonce {
        Nonce::assume_unique_for_key(nonce(&self.iv, number))
    }
}

/// Seals outgoing packets. Numbers must ascend, each used once.
pub struct Sealer {
    suite: Suite,
    numbered: bool,
    epoch: u64,
    /// Secret of the epoch.
    secret: Secret,
    key: Key,
}

impl Sealer {
    /// `numbered`: each packet carries its number.
    pub fn new(suite: Suite, first: &Secret, numbered: bool) -> Self {
        Self {
            suite,
            numbered,
            epoch: 0,
            secret: first.clone(),
            key: Key::new(suite, first),
        }
    }

    /// Bytes added to each payload.
    pub fn overhead(&self) -> usize {
        overhead(self.numbered)
    }

    /// Seals packet `number` in place: the payload is `slot` without the last [`Sealer::overhead`]
    /// bytes. `more`: as in the slot.
    pub fn seal(&mut self, number: u64, more: u32, slot: &mut [u8]) {
        while self.epoch < epoch(number) {
            self.epoch += 1;
            self.secret = successor(&self.secret);
            if self.epoch == epoch(number) {
                self.key = Key::new(self.suite, &self.secret);
            }
        }
        assert_eq!(self.epoch, epoch(number), "numbers ascend");
        let (payload, behind) = slot.split_at_mut(slot.len() - self.overhead());
        let nonce = self.key.nonce(number);
        let tag = self
            .key
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(associated(more, self.numbered)), payload)
            .expect("a packet is shorter than any algorithm's limit");
        behind[..TAG].copy_from_slice(tag.as_ref());
        if self.numbered {
            behind[TAG..].copy_from_slice(&told(number));
        }
    }
}

/// Opens received packets.
pub struct Opener {
    suite: Suite,
    /// Replay window, if packets carry their numbers.
    seen: Option<Seen>,
    /// Epoch of the highest packet number that was authentic.
    epoch: u64,
    previous: Option<Key>,
    present: Key,
    /// Derived ahead of time, so that forged numbers cost no key derivation.
    next: Key,
    /// Secret of the next epoch.
    next_secret: Secret,
}

impl Opener {
    /// With `numbered`, keeps a replay window of `window` numbers, at least 1,024. `begin`: number
    /// of a packet in the initial epoch.
    pub fn new(suite: Suite, first: &Secret, numbered: bool, window: u32, begin: u64) -> Self {
        let mut opener = Self {
            suite,
            seen: numbered.then(|| Seen::new(window)),
            epoch: 0,
            previous: None,
            present: Key::new(suite, first),
            next_secret: successor(first),
            next: Key::new(suite, &successor(first)),
        };
        while opener.epoch < epoch(begin) {
            opener.advance();
        }
        opener
    }

    /// Advances to the next epoch.
    fn advance(&mut self) {
        self.epoch += 1;
        self.next_secret = successor(&self.next_secret);
        let next = Key::new(self.suite, &self.next_secret);
        let present = std::mem::replace(&mut self.next, next);
        self.previous = Some(std::mem::replace(&mut self.present, present));
    }

    /// Opens a packet in place. Returns the length of its payload, which lies at the beginning;
    /// `None` if the packet is forged, replayed, or of an epoch out of range: then the bytes are
    /// undefined.
    ///
    /// `place`: the number in the ring, which is the packet's own unless packets carry theirs.
    /// `more`: as in the slot.
    pub fn open(&mut self, place: u64, more: u32, packet: &mut [u8]) -> Option<usize> {
        let mut number = place;
        let mut sealed = packet;
        if let Some(seen) = &self.seen {
            let (before, told) = sealed.split_last_chunk_mut::<NUMBER>()?;
            number = seal::number(*told);
            sealed = before;
            if !seen.is_new(number) {
                return None;
            }
        }
        // An empty payload is never sent: it stands for a given-up packet.
        if sealed.len() <= TAG {
            return None;
        }
        let key = match epoch(number).wrapping_sub(self.epoch) {
            0 => &self.present,
            1 => &self.next,
            u64::MAX => self.previous.as_ref()?,
            _ => return None,
        };
        let nonce = key.nonce(number);
        let marks = Aad::from(associated(more, self.seen.is_some()));
        let opened = key.key.open_in_place(nonce, marks, sealed).ok()?;
        let len = opened.len();
        if epoch(number) > self.epoch {
            self.advance();
        }
        if let Some(seen) = &mut self.seen {
            seen.insert(number);
        }
        Some(len)
    }
}

/// Minimum size of the replay window.
const WINDOW: u32 = 1024;

/// Replay window below the highest number, as in RFC 4303, section 3.4.3.
struct Seen {
    /// Number after the highest.
    end: u64,
    /// Numbers from `end - window` on: number n is bit n % window.
    bits: Box<[u64]>,
}

impl Seen {
    fn new(window: u32) -> Self {
        let window = window.max(WINDOW).next_power_of_two();
        Self {
            end: 0,
            bits: vec![0; window as usize / 64].into(),
        }
    }

    fn window(&self) -> u64 {
        self.bits.len() as u64 * 64
    }

    /// The word of a number, and its bit in that.
    fn bit(&self, number: u64) -> (usize, u64) {
        let bit = number % self.window();
        ((bit / 64) as usize, 1 << (bit % 64))
    }

    /// Whether a packet with this number may be accepted: not seen before, and not older than the
    /// window.
    fn is_new(&self, number: u64) -> bool {
        let (word, bit) = self.bit(number);
        number >= self.end || self.end - number <= self.window() && self.bits[word] & bit == 0
    }

    /// Records a new, authentic number. No sender reaches u64::MAX.
    fn insert(&mut self, number: u64) {
        if number >= self.end {
            if number - self.end >= self.window() {
                self.bits.fill(0);
            } else {
                for skipped in self.end..number {
                    let (word, bit) = self.bit(skipped);
                    self.bits[word] &= !bit;
                }
            }
            self.end = number + 1;
        }
        let (word, bit) = self.bit(number);
        self.bits[word] |= bit;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vtl_proto::seal::EPOCH;

    use super::*;

    fn secret() -> Secret {
        std::array::from_fn(|i| i as u8).into()
    }

    fn sealed(suite: Suite, numbered: bool, number: u64, payload: &[u8]) -> Vec<u8> {
        let mut packet = payload.to_vec();
        packet.resize(payload.len() + overhead(numbered), 0);
        Sealer::new(suite, &secret(), numbered).seal(number, 0, &mut packet);
        packet
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Expected values by the Python package `cryptography`:
    ///
    /// ```python
    /// def expand(secret, label, length):
    ///     info = length.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
    ///     return HKDFExpand(hashes.SHA256(), length, info).derive(secret)
    ///
    /// def seal(aead, size, number, payload):  # AESGCM or ChaCha20Poly1305; bytes of a key
    ///     secret = bytes(range(32))
    ///     for _ in range(number >> 22):
    ///         secret = expand(secret, UPDATE, 32)
    ///     key, iv = expand(secret, KEY, size), expand(secret, IV, 12)
    ///     nonce = bytes(a ^ b for a, b in zip(iv, number.to_bytes(12, "big")))
    ///     return aead(key).encrypt(nonce, payload, b"\0")
    /// ```
    #[test]
    #[cfg_attr(miri, ignore = "its cryptography is none")]
    fn sealer__known_answers() {
        let numbers = [0, 0x11_2233, (2 << 22) + 5];
        let expected = [
            (
                Suite::Aes128Gcm,
                [
                    "d72d796314598a6054f5de6fb21068b056fb37ccdde470747228605cb8",
                    "ba374ffd05a9e819a42d9e906e720526cd64d6d462805907d5d3afe6ca",
                    "9d94cb10eb3b9eebe3eecda0e197a23ddc565fc9ae69815365f89c898c",
                ],
            ),
            (
                Suite::Aes256Gcm,
                [
                    "c84f47af460bc5ee47b755e3142a7c6a7d5b1ea1d18ee715eddc936b50",
                    "a1ed9182f71ef72469cd68a585af98e49471c62d0e3b4068d9b279cc9c",
                    "37f97f01bf79952267ed917d84a51231ef9babc20d831d14d7f9b104f4",
                ],
            ),
            (
                Suite::ChaCha20Poly1305,
                [
                    "2e4fce25e29408976364ef367c34bb4e278147d46ba1da096b7e853a98",
                    "3d93cd0abadf41915d52bfddb71769707ef8e4710125b4d86ecdf1bb55",
                    "d634183b99290340cf623a4ec09cf991c4a1dc4a8db73a1e3ffd7d7528",
                ],
            ),
        ];
        for (suite, expected) in expected {
            for (number, expected) in numbers.into_iter().zip(expected) {
                let packet = sealed(suite, false, number, b"sealed by VTL");
                assert_eq!(hex(&packet), expected, "{suite}, {number:#x}");
                let told = sealed(suite, true, number, b"sealed by VTL");
                assert_eq!(hex(&told), format!("{expected}{number:016x}"));
            }
        }
    }

    /// Expected values by `expand` of the Python program above.
    #[test]
    #[cfg_attr(miri, ignore = "its cryptography is none")]
    fn directions__known_answers() {
        let [opener, other] = directions(&secret());
        let expected = "f28b875ac5d9b6b05e816892f28a678b23e9c4098b05fd11711916d4bf7310cc";
        assert_eq!(hex(opener.as_bytes()), expected);
        let expected = "2666203260757a1d39ce6721d9af19c5d48c63eb3756a0261751846517f82bea";
        assert_eq!(hex(other.as_bytes()), expected);
    }

    #[test]
    #[should_panic(expected = "numbers ascend")]
    fn sealer__goes_to_no_earlier_epoch() {
        let mut sealer = Sealer::new(Suite::Aes128Gcm, &secret(), false);
        sealer.seal(1 << EPOCH, 0, &mut [0; 17]);
        sealer.seal(0, 0, &mut [0; 17]);
    }

    /// An opener that begins with epoch 0, and what seals for it.
    fn opens(opener: &mut Opener, number: u64) -> bool {
        let mut packet = sealed(Suite::Aes128Gcm, true, number, b"payload");
        let opened = opener.open(u64::MAX, 0, &mut packet);
        opened.is_some_and(|len| packet[..len] == *b"payload")
    }

    fn opener(begin: u64) -> Opener {
        Opener::new(Suite::Aes128Gcm, &secret(), true, 0, begin)
    }

    #[test]
    fn opener__goes_on_by_one_epoch_at_most() {
        let mut o = opener(0);
        let first = |epoch: u64| epoch << EPOCH;
        assert!(!opens(&mut o, first(2)));
        assert!(opens(&mut o, first(1) - 2));
        assert!(opens(&mut o, first(1) + 1));
        assert!(opens(&mut o, first(1) - 1), "the epoch before");
        assert!(opens(&mut o, first(2)));
        assert!(!opens(&mut o, first(1) - 3), "two epochs before");
        assert!(!opens(&mut o, first(4)));
        assert_eq!(o.epoch, 2);
        assert!(opens(&mut opener(first(7) + 3), first(8)));
    }

    #[test]
    fn opener__a_forged_packet_changes_nothing() {
        let mut o = opener(0);
        let next = 1 << EPOCH;
        let mut packet = sealed(Suite::Aes128Gcm, true, next, b"payload");
        packet[0] ^= 1;
        assert_eq!(o.open(0, 0, &mut packet), None);
        assert_eq!(o.epoch, 0);
        assert!(opens(&mut o, next), "its number was not taken");
    }

    #[test]
    fn opener__refuses_what_is_too_short() {
        for len in 0..=overhead(true) {
            assert_eq!(opener(0).open(0, 0, &mut vec![0; len]), None);
        }
        let mut empty = sealed(Suite::Aes128Gcm, true, 3, b"");
        assert_eq!(opener(0).open(0, 0, &mut empty), None);
    }

    #[test]
    fn opener__takes_each_number_once_and_none_below_the_window() {
        let mut o = opener(0);
        for (number, taken) in [
            (5, true),
            (5, false),
            (3, true),
            (3, false),
            (1028, true),
            (5, false),
            (4, false),
            (6, true),
            (1027, true),
            (5000, true),
            (1028, false),
            (3976, false),
            (3977, true),
            (3977, false),
        ] {
            assert_eq!(opens(&mut o, number), taken, "{number}");
        }
    }

    proptest! {
        #[test]
        fn seen__is_a_set_with_a_window(steps in prop::collection::vec(0..3000_u64, 1..300)) {
            let mut seen = Seen::new(WINDOW);
            let mut taken = std::collections::BTreeSet::new();
            let mut base = 0;
            for step in steps {
                // Near the highest, on both sides of it.
                let number = (base + step).saturating_sub(2000);
                let highest = taken.last().copied().unwrap_or(0);
                let new = number + u64::from(WINDOW) > highest && !taken.contains(&number);
                prop_assert_eq!(seen.is_new(number), new);
                if new {
                    seen.insert(number);
                    taken.insert(number);
                    base = base.max(number);
                }
            }
        }

        #[test]
        fn opener__opens_what_was_sealed(
            payload in prop::collection::vec(any::<u8>(), 1..200),
            number in 0..1_u64 << (EPOCH + 1),
            (suite, numbered) in (prop::sample::select(&Suite::ALL[..]), any::<bool>()),
            flip in any::<prop::sample::Index>(),
        ) {
            let packet = sealed(suite, numbered, number, &payload);
            let open = |mut packet: Vec<u8>| {
                let mut opener = Opener::new(suite, &secret(), numbered, WINDOW, number);
                let len = opener.open(number, 0, &mut packet)?;
                packet.truncate(len);
                Some(packet)
            };
            prop_assert_eq!(open(packet.clone()), Some(payload));
            let mut forged = packet;
            let bit = flip.index(forged.len() * 8);
            forged[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(open(forged), None);
        }
    }
}
